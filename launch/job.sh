# shellcheck shell=bash
# Sourced by recipes/*.sh after they have found the checkout: what every job needs.
#
#   cds_train RECIPE [ARGUMENTS ...]      check, then start launch/train.py on the visible GPUs, or on $NUM_CPU_RANKS CPU ranks
#   cds_evaluate RECIPE [ARGUMENTS ...]   the recipe's benchmarks on the model that cds_train has left; answers are kept
#
# With --dry_run among the arguments cds_train says what the job would do and need, on this machine, and nothing runs.
#
# Under SLURM the devices are the scheduler's. With more than one node (#SBATCH --nodes) a hostfile is made from the
# allocation and srun starts one launcher a node; every rank then has a log of its own in logs/JOB/.
#
# SIGTERM or SIGUSR1 to the job script, and Ctrl-C, let the ranks finish their step and write a checkpoint; cds_train then
# returns 75, "try again": the same command continues. After SIGUSR1, which `#SBATCH --signal=B:USR1@300` sends before the
# time is up, a SLURM job puts itself into the queue again. A second Ctrl-C leaves at once.

export CLUSTER_DS_HOME
. "$CLUSTER_DS_HOME/launch/setup.sh"

# Time-outs between ranks and nodes, unless the user has set others.
export DEEPSPEED_TIMEOUT="${DEEPSPEED_TIMEOUT:-30}" # minutes
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}" NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# GPUs of this node that the job may use: the scheduler's choice, else what the driver shows; 0 without any.
_cds_devices() {
    if [ -n "${NUM_CPU_RANKS:-}" ]; then
        echo "$NUM_CPU_RANKS"
    elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # empty: none
        tr ',' '\n' <<< "${CUDA_VISIBLE_DEVICES/NoDevFiles/}" | grep -c . || true
    elif [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        echo "$SLURM_GPUS_ON_NODE"
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

# The launcher's command in the array `launcher`; on several nodes through srun, which needs no ssh between them.
_cds_launcher() {
    local devices="$1" nodes="${SLURM_JOB_NUM_NODES:-1}" port="${MASTER_PORT:-}" deepspeed first
    deepspeed="$(command -v deepspeed || true)"
    [ -z "$port" ] && [ -n "${SLURM_JOB_ID:-}" ] && port=$((20000 + SLURM_JOB_ID % 20000)) # the same on every node
    launcher=("$PYTHON" -m deepspeed.launcher.runner)
    [ -z "$deepspeed" ] || launcher=("$deepspeed")
    if [ "$nodes" -gt 1 ]; then
        if [ "$devices" -eq 0 ]; then
            echo "error: no GPUs are visible on this node: ask for them (#SBATCH --gpus-per-node)" >&2
            return 2
        fi
        cds_logs="$PWD/logs/$SLURM_JOB_ID"
        mkdir -p "$cds_logs"
        scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots=$devices/" > "$cds_logs/hostfile"
        if [ ! -s "$cds_logs/hostfile" ]; then # errexit does not hold in here
            echo "error: scontrol names no hosts of SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}" >&2
            return 2
        fi
        first="$(head -n 1 "$cds_logs/hostfile" | cut -d ' ' -f 1)"
        # Only the first node runs this script, whose end its ranks watch for.
        # shellcheck disable=SC2016 # the node's own shell expands it
        launcher=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1
            ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} bash -c
            '[ "$SLURM_NODEID" = 0 ] || unset CLUSTER_DS_JOB_PID; ds="$1"; shift; exec "$ds" --node_rank "$SLURM_NODEID" "$@"' -)
        launcher+=("${deepspeed:?deepspeed is not in PATH}" --no_ssh --hostfile "$cds_logs/hostfile"
            --master_addr "${MASTER_ADDR:-$first}" --enable_each_rank_log "$cds_logs")
    elif [ -n "${NUM_CPU_RANKS:-}" ]; then
        launcher+=(--num_gpus "$NUM_CPU_RANKS") # else DeepSpeed would start one rank per NUMA node
    fi
    [ -z "$port" ] || launcher+=(--master_port "$port") # else the ranks take a free one
}

# Rank 0's log on several nodes, copied to the job's as it grows.
_cds_follow() {
    local runner="$1" file=""
    while [ -z "$file" ] && kill -0 "$runner" 2>/dev/null; do
        sleep 1
        file="$(find "$cds_logs" -name '*_rank0.log' -newer "$cds_logs/hostfile" | sort | tail -n 1)"
    done
    [ -z "$file" ] || exec tail -n +1 -f --pid="$runner" "$file"
}

# Run a command in the background; SIGTERM, SIGHUP and SIGUSR1 run $1, Ctrl-C runs $2, which let it end, instead of ending this
# script. Its exit code is left in cds_code, and whether SIGUSR1 came in cds_requeue.
_cds_run() {
    local stop="$1" interrupt="$2" follower=""
    shift 2
    cds_requeue=""
    # shellcheck disable=SC2064 # the traps' own variables are expanded when they run
    trap "$stop" TERM HUP
    # shellcheck disable=SC2064
    trap "cds_requeue=1; $stop" USR1
    # shellcheck disable=SC2064
    trap "$interrupt" INT
    set -m # a process group of its own, so that Ctrl-C reaches this script alone
    "$@" &
    cds_runner=$!
    set +m
    if [ -n "$cds_logs" ]; then
        _cds_follow "$cds_runner" &
        follower=$!
    fi
    while :; do # a trapped signal ends `wait`, not the job
        cds_code=0
        wait "$cds_runner" || cds_code=$?
        kill -0 "$cds_runner" 2>/dev/null || break
    done
    [ -z "$follower" ] || wait "$follower" || true
    trap - TERM USR1 INT HUP
}

# A job whose time was up goes into the queue again.
_cds_requeue() {
    if [ "$1" -eq 75 ] && [ -n "$cds_requeue" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
        echo "job $SLURM_JOB_ID goes into the queue again and will continue"
        scontrol requeue "$SLURM_JOB_ID" || echo "scontrol could not requeue it: submit it again" >&2
    fi
}

cds_train() {
    local recipe="$1" devices argument probe="" quiet=--quiet # the launcher's own lines are left out, errors apart
    local -a launcher=() told=()
    shift
    devices="$(_cds_devices)"
    [ "$devices" -eq 0 ] || told=(--ranks $((devices * ${SLURM_JOB_NUM_NODES:-1})))
    cds_dry_run="" cds_logs=""
    for argument in "$@"; do
        case "$argument" in
            --dry_run) cds_dry_run=1 ;;
            --probe | --probe=*) probe=1 ;;
            --verbose) quiet="" ;;
        esac
    done
    if [ -n "$cds_dry_run" ] && [ -z "$probe" ]; then # outside of a job the devices here say nothing about those of one
        [ -n "${SLURM_JOB_ID:-}" ] || told=()
        "$PYTHON" "$CLUSTER_DS_HOME/launch/train.py" --recipe "$recipe" "${told[@]}" "$@"
        return
    fi
    _cds_options "$@"
    if [ -z "$cds_dry_run" ]; then
        "$PYTHON" "$CLUSTER_DS_HOME/launch/recipe.py" check "$recipe" --before_job "${told[@]}" "${cds_options[@]}" || return
    fi
    _cds_launcher "$devices" || return
    [ -z "$quiet" ] || launcher+=("$quiet")

    # The launcher would kill its ranks; rank 0, maybe on another node, looks for this file instead.
    cds_stop_file="$PWD"
    [ -w "$cds_stop_file" ] || cds_stop_file="${TMPDIR:-/tmp}" # else nothing could stop the job; seen by this node alone
    cds_stop_file="$(mktemp -u "$cds_stop_file/.cluster_ds_stop.XXXXXX")" # a name alone: that the file is there is the message
    export CLUSTER_DS_JOB_PID=$$ # ranks on this node leave when this script has gone
    # shellcheck disable=SC2016 # expanded when the traps run
    _cds_run ': >> "$cds_stop_file"' '[ ! -e "$cds_stop_file" ] || echo now >> "$cds_stop_file"; : >> "$cds_stop_file"' \
        "${launcher[@]}" "$CLUSTER_DS_HOME/launch/train.py" --recipe "$recipe" --stop_file "$cds_stop_file" "$@"
    # Rank 0 has answered; the launcher's own code may be another one.
    ! grep -qx stopped "$cds_stop_file" 2>/dev/null || cds_code=75
    rm -f "$cds_stop_file"
    _cds_requeue "$cds_code"
    return "$cds_code"
}

cds_evaluate() {
    local recipe="$1"
    shift
    [ -z "${cds_dry_run:-}" ] || return 0
    _cds_options "$@"
    cds_logs="" cds_told=""
    # What is answered is kept, so it may end at any time, and all of its processes with it.
    # shellcheck disable=SC2016
    _cds_run 'cds_told=1; kill -TERM -- "-$cds_runner" 2>/dev/null' 'cds_told=1; kill -INT -- "-$cds_runner" 2>/dev/null' \
        "$PYTHON" "$CLUSTER_DS_HOME/eval/run.py" --recipe "$recipe" "${cds_options[@]}"
    [ -z "$cds_told" ] || [ "$cds_code" -eq 0 ] || cds_code=75
    _cds_requeue "$cds_code"
    return "$cds_code"
}

# Those of a job's arguments that say what and where the run is, in the array `cds_options`.
_cds_options() {
    cds_options=()
    while [ "$#" -gt 0 ]; do
        case "$1" in
            --set | --output_dir | --deepspeed_config)
                cds_options+=("$1" "${2-}")
                [ "$#" -eq 1 ] || shift
                ;;
            --set=* | --output_dir=* | --deepspeed_config=*) cds_options+=("$1") ;;
        esac
        shift
    done
}
