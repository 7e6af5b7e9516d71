# Steps that are timed. The script that sources this file sets `work` to a new folder, which is removed at its end.
#
#     step NAME COMMAND...     runs a command
#     start NAME COMMAND...    runs it in the background; of these, two run at a time
#     finish                   waits for those in the background and prints what each of them printed
#
# A step that fails ends the script. At the end, whatever ends it, a table lists the seconds of every step.

names=()       # of all steps, in the order in which they began
background=()  # names of those that `finish` waits for
declare -A process began file  # of each step; FILE.log gets what a step in the background prints, FILE.end its status and end

say() { printf '\n=== %s (%s s)\n' "$1" "$SECONDS"; }

launch() {  # launch NAME COMMAND...: in a process group of its own, which ends with the script
  names+=("$1")
  began[$1]=$SECONDS
  set -m
  (
    set +m
    end_file="${file[$1]}.end"  # not a local variable: bash may have left this function when it runs the trap
    trap 'echo "$? $SECONDS" > "$end_file"' EXIT
    trap 'exit 143' HUP INT TERM  # without it, bash runs the trap above with status 0
    "${@:2}"
  ) < /dev/null &
  set +m
  process[$1]=$!
}

step() {
  file[$1]="$work/step${#names[@]}"
  say "$1"
  launch "$@"
  passed "$1" || fail "$1"
}

start() {
  while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n || finish; done
  file[$1]="$work/step${#names[@]}"
  launch "$@" &> "${file[$1]}.log"
  background+=("$1")
}

finish() {
  local name status
  for name in "${background[@]}"; do
    passed "$name" && status=0 || status=1
    say "$name"
    cat "${file[$name]}.log"
    [ $status = 0 ] || fail "$name"
  done
  background=()
}

passed() {  # waits for a step
  wait "${process[$1]}" || true  # `wait -n` may have taken its status, so the file is read
  local status=killed
  [ ! -f "${file[$1]}.end" ] || read -r status _ < "${file[$1]}.end"
  [ "$status" = 0 ]
}

fail() {
  printf '\n=== FAILED: %s\n' "$1"
  exit 1
}

table() {
  local name status end
  printf '\n%8s %8s  %s\n' start seconds step
  for name in "${names[@]}"; do
    status=killed end=$SECONDS
    [ ! -f "${file[$name]}.end" ] || read -r status end < "${file[$name]}.end"
    [ "$status" = 0 ] && status= || status=" (status $status)"
    printf '%8s %8s  %s\n' "${began[$name]}" "$((end - ${began[$name]}))" "$name$status"
  done
  printf '%8s %8s  %s\n' 0 "$SECONDS" "the whole"
}

end_all() {
  trap '' HUP INT TERM
  set +m  # a signal may have come within `launch`: bash would tell of every process that ends
  local groups group
  groups=$(jobs -rp)
  for group in $groups; do kill -s TERM -- "-$group" 2> /dev/null || true; done
  for _ in {1..100}; do  # pytest ends the servers of its tests
    [ -n "$(jobs -rp)" ] || break
    sleep 0.1
  done
  for group in $groups; do kill -s KILL -- "-$group" 2> /dev/null || true; done
  wait 2> /dev/null || true  # here bash tells of those that were killed
  table
  rm -rf "$work"
}
trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
