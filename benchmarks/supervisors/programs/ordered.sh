# A service that takes a second to become ready and half of one to end, and says when.
trap 'echo "$1 term $$" >"$2/events"; sleep 0.5; echo "$1 end $$" >"$2/events"; exit 0' TERM
echo "$1 start $$" >"$2/events"
sleep 1
echo "$1 ready $$" >"$2/events"
: >"$2/$1.ready"
echo "$1 is ready"
[ -z "$NOTIFY_FD" ] || eval "echo >&$NOTIFY_FD"
read -r _ <"$2/never"
