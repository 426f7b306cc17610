# A service that ignores SIGTERM.
trap '' TERM
echo "$1 start $$" >"$2/events"
echo "$1 is up"
[ -z "$NOTIFY_FD" ] || eval "echo >&$NOTIFY_FD"
read -r _ <"$2/never"
