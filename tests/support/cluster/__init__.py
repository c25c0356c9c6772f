"""A real Slurm cluster on this machine, and the jobs that run on it."""
