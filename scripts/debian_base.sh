#!/bin/sh
# Makes the base of Containerfile from Debian's packages, where no registry of images can be reached:
#   sudo scripts/debian_base.sh python-debian forky
#   podman build --build-arg BASE=python-debian --file Containerfile --tag decentlam .
# Needs root, debootstrap and podman. The suite says which Python it is: trixie has 3.13.
set -eu
tag=${1:-python-debian}
suite=${2:-trixie}
root=$(mktemp --directory)
trap 'rm -rf "$root"' EXIT

# A debootstrap that is older than the suite has no script of its own for it; sid's fits.
scripts=/usr/share/debootstrap/scripts
script=$scripts/$suite
[ -e "$script" ] || script=$scripts/sid
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$root/system" http://deb.debian.org/debian "$script"

# Debian's own Python takes no packages from pip; one in a venv does.
chroot "$root/system" python3 -m venv /opt/venv
tar --directory "$root/system" --create . | podman import \
    --change 'ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$tag"
