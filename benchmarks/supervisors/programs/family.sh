# A service with three more processes: in its group, in a session of their own, and forked away twice.
sleep 100001 &
setsid sleep 100002 &
(setsid sh -c 'sleep 100003 &' &)
sleep 0.3
echo "$1 start $$" >"$2/events"
echo "$1 is up"
[ -z "$NOTIFY_FD" ] || eval "echo >&$NOTIFY_FD"
read -r _ <"$2/never"
