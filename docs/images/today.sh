nodes=$(scontrol show hostnames \
    "$SLURM_JOB_NODELIST")
first=$(echo "$nodes" | head -n 1)
case "$SYSTEMNAME" in  # its InfiniBand name
juwels*|jurecadc|jusuf) first="${first}i" ;;
esac
export GLOO_SOCKET_IFNAME=ib0
srun python -m torchrun_jsc \
    --nproc_per_node=gpu \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --rdzv_backend=c10d \
    --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_endpoint="$first:54123" \
    main.py
