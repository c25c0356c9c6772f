srun python -m torchrun_hpc \
    --nproc_per_node=gpu main.py
