# Sourced by recipes/*.sh after they have found the checkout: what every job needs.
#
#   cds_train RECIPE [ARGUMENTS ...]   start launch/train.py on this node's GPUs, or on $NUM_CPU_RANKS CPU ranks
#
# SIGTERM or SIGUSR1 to the job script, and Ctrl-C, let the ranks finish their step and write a checkpoint; cds_train then
# returns 75, "try again": the same command continues. A second Ctrl-C leaves at once.

cds_train() {
    local recipe="$1" code=0 runner
    shift
    local -a options=()
    # Without GPUs DeepSpeed would start one rank per NUMA node; with GPUs it takes the visible ones.
    [ -z "${NUM_CPU_RANKS:-}" ] || options+=(--num_gpus "$NUM_CPU_RANKS")
    [ -z "${MASTER_PORT:-}" ] || options+=(--master_port "$MASTER_PORT") # else the ranks take a free one
    # The launcher would kill its ranks; rank 0, maybe on another node, looks for this file instead.
    cds_stop_file="$PWD"
    [ -w "$cds_stop_file" ] || cds_stop_file="${TMPDIR:-/tmp}" # else nothing could stop the job; seen by this node alone
    cds_stop_file="$(mktemp -u "$cds_stop_file/.cluster_ds_stop.XXXXXX")"
    export CLUSTER_DS_JOB_PID=$$ # ranks on this node leave when this script has gone
    trap ': >> "$cds_stop_file"' TERM USR1 HUP
    trap '[ ! -e "$cds_stop_file" ] || echo now >> "$cds_stop_file"; : >> "$cds_stop_file"' INT
    set -m # a process group of its own, so that Ctrl-C reaches this script alone
    "$PYTHON" -m deepspeed.launcher.runner "${options[@]}" "$CLUSTER_DS_HOME/launch/train.py" \
        --recipe "$recipe" --stop_file "$cds_stop_file" "$@" &
    runner=$!
    set +m
    while :; do # a trapped signal ends `wait`, not the job
        code=0
        wait "$runner" || code=$?
        kill -0 "$runner" 2>/dev/null || break
    done
    trap - TERM USR1 INT HUP
    # Rank 0 has answered; the launcher's own code may be another one.
    ! grep -qx stopped "$cds_stop_file" 2>/dev/null || code=75
    rm -f "$cds_stop_file"
    return "$code"
}
