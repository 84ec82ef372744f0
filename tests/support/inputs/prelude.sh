# Before the script of every case. Functions and variables: tests/inputs/README.md.
PY=${P%% *}
TRAIN="$P train $PWD/tiny.yaml parallel.tp=1"
ROWS=$PWD/runs/tiny/metrics.jsonl
DRIVE="$PY $PYTHONPATH/tests/support/inputs/drive.py"
FAULT="$PY $PYTHONPATH/tests/support/inputs/fault.py"
export PY TRAIN ROWS DRIVE FAULT
# Waits until a file exists.
await() { i=0; until test -e "$1" -o $i = 900; do i=$(($i+1)); sleep 0.2; done; }
# $R runs a command as a root without its right to read and write everything.
as_user() { R='setpriv --bounding-set=-dac_override,-dac_read_search'; $R true || exit 0; }
# Runs a script with a small disk at disk/, and then a second one that may end with code 9.
on_disk() {
    mkdir "$PWD/disk"
    unshare -m sh -c "mount -t tmpfs -o $1 x $PWD/disk; $2; a=\$?; ${3:-} exit \$a"
}
