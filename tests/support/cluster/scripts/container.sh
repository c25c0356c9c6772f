#!/bin/sh
# A stand-in for a container on a node of the test cluster.
#
#     sh container.sh [OPTION ...] PROGRAM [ARGUMENT ...]
#
# Inside there is nothing of Slurm, neither programs nor files; the host is named
# "container" on every node, which nothing resolves; and process numbers start from 1.
#
#     --hook              export what enroot's hook for PyTorch exports
#     --cleanenv=PATTERN  let only these variables in, and what every program needs
#     --hosts=FILE        the container's own /etc/hosts
#     --network=none      a network of its own: nothing but loopback
#     --network=bridge    the same and an interface behind NAT, as Docker has it; for one
#                         container on a node
#     --network=macvlan   the same and an interface in the management network, with the
#                         address 10.10.0.100 + the node's number
set -eu

hosts='' network=''
while :; do
    case $1 in
        --hook)
            # enroot runs its hooks outside, where there is scontrol.
            first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
            : "${MASTER_ADDR:=$first}" "${MASTER_PORT:=$((SLURM_JOB_ID % 4536 + 61000))}"
            : "${RANK:=$SLURM_PROCID}" "${LOCAL_RANK:=$SLURM_LOCALID}"
            : "${WORLD_SIZE:=$SLURM_NTASKS}"
            export MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE
            if [ "$SLURM_NTASKS" -gt "$SLURM_STEP_NUM_NODES" ]; then
                export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
            fi
            ;;
        --cleanenv=*)
            for name in $(env | sed -n 's/^\([A-Za-z_0-9]*\)=.*/\1/p'); do
                case $name in
                    ${1#*=} | PATH | HOME | LANG | SLURM_CONF) ;;
                    *) unset "$name" ;;
                esac
            done
            ;;
        --hosts=*) hosts=${1#*=} ;;
        --network=*) network=${1#*=} ;;
        *) break ;;
    esac
    shift
done

# shellcheck disable=SC2016 # for the shell inside
inside='
set -eu
hosts=$1 network=$2
shift 2
outside() { nsenter --net=/proc/self/fd/9 "$@"; }

for program in scontrol srun sbatch salloc sinfo squeue scancel; do
    if path=$(command -v "$program"); then
        mount --bind /dev/null "$path"
    fi
done
for folder in /etc/slurm "${SLURM_CONF%/*}"; do
    if [ -d "$folder" ]; then
        mount -t tmpfs none "$folder"
    fi
done
if [ -n "$hosts" ]; then
    mount --bind "$hosts" /etc/hosts
fi
echo container > /proc/sys/kernel/hostname

if [ -n "$network" ]; then
    ip link set lo up
fi
case $network in
    bridge)
        # That of an earlier container goes a moment after its namespace.
        outside ip link delete bridge0 2> /dev/null || :
        outside ip link add bridge0 type veth peer name eth0 netns $$
        outside ip address add 172.17.0.1/24 dev bridge0
        outside ip link set bridge0 up
        outside sh -c "echo 1 > /proc/sys/net/ipv4/ip_forward"
        ip address add 172.17.0.2/24 dev eth0
        ip link set eth0 up
        ip route add default via 172.17.0.1
        outside nft "
            table ip bridge0
            delete table ip bridge0
            table ip bridge0 {
                chain nat {
                    type nat hook postrouting priority 100;
                    ip saddr 172.17.0.2 masquerade;
                }
            }"
        ;;
    macvlan)
        own=$(outside ip -brief -4 address show dev eth0 | sed "s|/.*||; s|.*\.||")
        outside ip link add link eth0 name eth0 netns $$ type macvlan mode bridge
        ip address add "10.10.0.$((100 + own))/24" dev eth0
        ip link set eth0 up
        ;;
esac
exec unshare --pid --fork --kill-child --mount-proc "$@" 9<&-
'
exec 9< /proc/self/ns/net
exec unshare --mount --uts ${network:+--net} sh -c "$inside" sh "$hosts" "$network" "$@"
