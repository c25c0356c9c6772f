srun env -u CUDA_VISIBLE_DEVICES \
    python -m torchrun_hpc \
    --nproc_per_node=gpu main.py
