#!/bin/sh
# Install what the test cluster needs (Debian, Ubuntu). Silent when all is there.
set -eu

PATH=$PATH:/usr/sbin:/sbin
absent=
for pair in slurmctld:slurm-wlm slurmd:slurm-wlm srun:slurm-wlm munged:munge \
    ip:iproute2 nft:nftables nsenter:util-linux unshare:util-linux \
    faketime:faketime; do
    command -v "${pair%%:*}" > /dev/null || absent="$absent ${pair#*:}"
done
[ -n "$absent" ] || exit 0

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
