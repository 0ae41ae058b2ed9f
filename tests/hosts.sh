#!/usr/bin/env bash
# Runs a Python script on several hosts that share nothing but a network.
#
#   tests/hosts.sh run --hosts=3 --rate=200mbit --communicator=horovod -- \
#       examples/mnist.py --period=16
#
# A host is a network namespace with an address, a name and a hosts file of its
# own, and a cable to a switch, which is a namespace too: nothing of it can meet
# the machine's networks or another run's. Each line that a host prints appears
# with its name before it. The script finds the name of its network interface in
# AVG_HOSTS_INTERFACE, whose bytes are counted under /sys/class/net.
#
#   --hosts=2                  How many.
#   --rate=none                What a host may send per second, in tc's units.
#   --communicator=collective  Or horovod: whose variables the script gets.
#   --limit=300                Seconds that all may take.
#
# PYTHON is the interpreter, .venv/bin/python by default. The exit code is that
# of the host that failed first; 124: they took too long; 77: this machine has
# no namespaces for us. Hosts have 20 s to end by themselves after one failed.
#
# A run that is killed by SIGKILL leaves its namespaces, which disturb no other.
# Where no other run goes on, this removes them and what still runs in them:
#
#   tests/hosts.sh clean
set -euo pipefail

readonly interface=eth0 subnet=10.77.0 port=2222 grace_seconds=20
# Small, or a round would travel for free: 1 ms of 256 Mbit/s.
readonly burst=32kb

tests=$(cd "${BASH_SOURCE[0]%/*}" && pwd)
python=${PYTHON:-$tests/../.venv/bin/python}
hosts=2 rate=none communicator=collective limit=300

# Prints what a run's rendezvous tells each rank, then serves until killed.
readonly rendezvous='
import pathlib, runpy, signal, sys

module, folder, *hosts = sys.argv[1:]
# Without the package, which would load TensorFlow.
horovod = runpy.run_path(module)
with horovod["Rendezvous"](hosts) as server:
    for rank in range(len(hosts)):
        variables = horovod["environment"](
            rank, hosts, address=hosts[0], port=server.port
        )
        lines = [f"{name}={value}\n" for name, value in variables.items()]
        pathlib.Path(folder, f"variables{rank}").write_text("".join(lines))
    pathlib.Path(folder, "ready").touch()
    signal.pause()
'

say() {
  echo "tests/hosts.sh: $*" >&2
}

fail() {
  say "$*"
  exit 2
}

skip() {
  say "skipped, $*"
  exit 77
}

# Runs a command that a machine may not allow.
try() {
  local error
  error=$("$@" 2>&1) || skip "this machine does not allow \`$*\`: $error"
}

address() {
  echo "$subnet.$((10 + $1))"
}

parse() {
  while (($#)); do
    case $1 in
      --hosts=*) hosts=${1#*=} ;;
      --rate=*) rate=${1#*=} ;;
      --communicator=*) communicator=${1#*=} ;;
      --limit=*) limit=${1#*=} ;;
      --) break ;;
      *) fail "options are --hosts, --rate, --communicator and --limit, then" \
        "comes -- and the script. Received: $1" ;;
    esac
    shift
  done
  (($# > 1)) || fail "a script must follow --"
  [[ $hosts =~ ^[1-9][0-9]?$ ]] ||
    fail "--hosts must be from 1 to 99. Received: $hosts"
  [[ $limit =~ ^[1-9][0-9]*$ ]] ||
    fail "--limit must be in whole seconds. Received: $limit"
  [[ $communicator =~ ^(collective|horovod)$ ]] ||
    fail "--communicator must be collective or horovod. Received:" \
      "$communicator"
  script=("${@:2}")
}

check_machine() {
  local tool
  for tool in ip tc; do
    command -v "$tool" >/dev/null ||
      skip "\`$tool\` is missing: apt-get install iproute2"
  done
  ((EUID == 0)) || skip "network namespaces need root"
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) ||
    skip "bash 5.1 is needed. Received: $BASH_VERSION"
}

make_network() {
  local rank
  # A name that is taken is that of a run that was killed.
  while [[ -e /run/netns/avg$run-switch ]]; do
    run=$((run + 1))
  done
  namespaces=("avg$run-switch")
  try ip netns add "avg$run-switch"
  try ip -n "avg$run-switch" link add switch type bridge
  ip -n "avg$run-switch" link set switch up
  write_names
  for ((rank = 0; rank < hosts; rank++)); do
    make_host "$rank" "avg$run-host$rank"
  done
}

make_host() {
  local rank=$1 namespace=$2 switch=avg$run-switch
  namespaces+=("$namespace")
  mkdir -p "/etc/netns/$namespace"
  cp "$folder/hosts" "/etc/netns/$namespace/hosts"
  try ip netns add "$namespace"
  try ip -n "$switch" link add "host$rank" type veth \
    peer name "$interface" netns "$namespace"
  # Without IPv6, which sends messages of its own.
  ip -n "$switch" link set "host$rank" addrgenmode none
  ip -n "$switch" link set "host$rank" master switch up
  ip -n "$namespace" link set lo up
  ip -n "$namespace" link set "$interface" addrgenmode none
  ip -n "$namespace" addr add "$(address "$rank")/24" dev "$interface"
  ip -n "$namespace" link set "$interface" up
  [[ $rate == none ]] || try tc -n "$namespace" qdisc add dev "$interface" \
    root tbf rate "$rate" burst "$burst" latency 100ms
}

# A host finds the others, and itself, by name and not at a loopback address.
write_names() {
  local rank
  {
    echo "127.0.0.1 localhost"
    for ((rank = 0; rank < hosts; rank++)); do
      echo "$(address "$rank") host$rank"
    done
  } >"$folder/hosts"
}

# Writes a file for each rank with what tells it which worker it is.
write_variables() {
  local rank addresses=() workers
  for ((rank = 0; rank < hosts; rank++)); do
    addresses+=("$(address "$rank")")
  done
  if [[ $communicator == horovod ]]; then
    start_rendezvous "${addresses[@]}"
    return
  fi
  workers=$(printf ", \"%s:$port\"" "${addresses[@]}")
  for ((rank = 0; rank < hosts; rank++)); do
    printf 'TF_CONFIG={"cluster": {"worker": [%s]}, "task": %s}\n' \
      "${workers:2}" "{\"type\": \"worker\", \"index\": $rank}" \
      >"$folder/variables$rank"
  done
}

start_rendezvous() {
  ip netns exec "avg$run-host0" "$python" -c "$rendezvous" \
    "$tests/../tf_avgstrategy/workers/horovod_rendezvous.py" "$folder" "$@" &
  local server=$!
  disown "$server"
  until [[ -e $folder/ready ]]; do
    kill -0 "$server" 2>/dev/null || fail "Horovod's rendezvous did not start"
    sleep 0.05
  done
}

start_workers() {
  local rank variables
  for ((rank = 0; rank < hosts; rank++)); do
    mapfile -t variables <"$folder/variables$rank"
    mkfifo "$folder/output$rank"
    show "host$rank" <"$folder/output$rank" &
    ip netns exec "avg$run-host$rank" unshare --uts \
      bash -c 'hostname "$0" && exec env "$@"' "host$rank" \
      "${variables[@]}" "AVG_HOSTS_INTERFACE=$interface" \
      "$python" -u "${script[@]}" >"$folder/output$rank" 2>&1 &
    rank_of[$!]=$rank
  done
}

show() {
  local line
  while IFS= read -r line || [[ -n $line ]]; do
    printf '[%s] %s\n' "$1" "$line"
  done
}

# Returns the exit code of the worker that failed first, 0 if none did.
wait_for_workers() {
  local result=0 code ended
  sleep "$limit" &
  timer=$!
  while ((${#rank_of[@]})); do
    code=0
    wait -n -p ended "${!rank_of[@]}" "$timer" || code=$?
    if ((ended == timer)); then
      say "did not end in time: ${rank_of[*]/#/host}"
      return $((result ? result : 124))
    fi
    if ((code && !result)); then
      result=$code
      say "host${rank_of[$ended]} failed first, with exit code $code"
      kill "$timer" && wait "$timer" || true
      sleep "$grace_seconds" &
      timer=$!
    fi
    unset "rank_of[$ended]"
  done
  return "$result"
}

clean_up() {
  trap "" HUP INT TERM
  # Or bash tells which jobs were killed.
  exec 2>/dev/null
  remove "${namespaces[@]}"
  [[ -z $timer ]] || kill "$timer" || true
  # What the hosts have printed.
  wait || true
  rm -rf "$folder"
}

remove() {
  local namespace pids
  for namespace; do
    while pids=$(ip netns pids "$namespace") && [[ -n $pids ]]; do
      # One of them may have ended by now.
      kill -KILL $pids || true
      sleep 0.02
    done
    ip netns del "$namespace" || true
    rm -rf "/etc/netns/$namespace"
  done
}

run() {
  parse "$@"
  check_machine
  run=$$ namespaces=() timer=""
  declare -gA rank_of=()
  folder=$(mktemp -d)
  trap clean_up EXIT
  trap "exit 129" HUP
  trap "exit 130" INT
  trap "exit 143" TERM
  unset TF_CONFIG
  # Horovod's other settings reach its workers.
  [[ $communicator == horovod ]] || unset ${!HOROVOD_@}
  make_network
  write_variables
  start_workers
  wait_for_workers
}

clean() {
  check_machine
  local name
  for name in $(ip netns list | grep -oE '^avg[0-9]+-(switch|host[0-9]+)'); do
    remove "$name"
  done
}

case ${1-} in
  run | clean) "$@" ;;
  *) fail "the first argument must be run or clean. Received: ${1-nothing}" ;;
esac
