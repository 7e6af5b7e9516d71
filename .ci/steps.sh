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

end_groups() {  # end_groups SIGNAL GROUPS TENTHS: sends it, and waits for the steps until then
  local group tenth
  for group in $2; do kill -s "$1" -- "-$group" || true; done
  for ((tenth = 0; tenth < $3; tenth++)); do
    [ -n "$(jobs -rp)" ] || break
    sleep 0.1
  done
}

end_all() {
  trap '' HUP INT TERM
  exec 2> /dev/null  # to which bash tells of the processes that end
  local groups
  groups=$(jobs -rp)
  end_groups TERM "$groups" 50  # pytest ends the servers of its tests
  end_groups TERM "$(jobs -rp)" 50  # a shell may have missed the first: it had it while it started a command
  end_groups KILL "$groups" 0
  wait || true
  table
  rm -rf "$work"
}
trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
