# Sourced by recipes/*.sh after they have found the checkout: what every job needs.
#
#   cds_train RECIPE [ARGUMENTS ...]   start launch/train.py on this node's GPUs, or on $NUM_CPU_RANKS CPU ranks

cds_free_port() {
    "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

cds_train() {
    local recipe="$1"
    shift
    local -a ranks=()
    # Without GPUs DeepSpeed would start one rank per NUMA node; with GPUs it takes the visible ones.
    [ -n "${NUM_CPU_RANKS:-}" ] && ranks=(--num_gpus "$NUM_CPU_RANKS")
    "$PYTHON" -m deepspeed.launcher.runner "${ranks[@]}" --master_port "${MASTER_PORT:-$(cds_free_port)}" \
        "$CLUSTER_DS_HOME/launch/train.py" --recipe "$recipe" "$@"
}
