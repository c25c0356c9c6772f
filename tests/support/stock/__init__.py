"""Stock torchrun, and the installed torch, beside ours."""
