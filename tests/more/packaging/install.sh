#!/bin/sh
# Install what builds the recipes of packaging/: Lmod from Debian; into virtual
# environments in .packaging EasyBuild, rattler-build, and the oldest hatchling, which
# EasyBuild's foss-2023b has. Silent when all is there.
set -eu
cd "$(dirname "$0")/../../.."

install_lmod() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        lmod > /dev/null
}
if [ -e /usr/share/lmod/lmod/libexec/lmod ]; then
    :
elif [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "No test of modules: this needs root and apt-get to install lmod."
else
    install_lmod 2> /dev/null || { apt-get update -qq && install_lmod; }
fi

# The tests give these the compiled packages of .venv, so it must be the same Python.
python=.venv/bin/python
is=$($python -c 'import platform; print(platform.python_version())')
for release in easybuild==5.4.1 py-rattler-build==0.73.0 hatchling==1.18.0; do
    folder=.packaging/${release%%==*}
    [ ! -e "$folder/installed-${release##*=}-$is" ] || continue
    $python -m venv --clear "$folder"
    "$folder/bin/pip" install --quiet --quiet --disable-pip-version-check "$release"
    touch "$folder/installed-${release##*=}-$is"
done
