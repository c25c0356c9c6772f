"""An all-reduce on GPUs over NCCL, and a matrix product: CUDA works in this process."""

import json
import os
import sys

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
values = torch.full((256, 256), float(dist.get_rank() + 1), device=device)
dist.all_reduce(values)
product = (values @ values).sum().item()
seen = {
    "rank": dist.get_rank(),
    "sum": values[0, 0].item(),
    "product": product,
    "device": torch.cuda.get_device_name(device),
    "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
}
dist.destroy_process_group()
if seen["restarts"] == "0" and "fail" in sys.argv:
    sys.exit(1)
sys.stdout.write(json.dumps(seen) + "\n")
