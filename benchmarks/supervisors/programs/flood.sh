# A service that writes numbered lines of 100 bytes as fast as they are taken, and ends right after the last.
echo "$1 start $$" >"$2/events"
seq -f "flood-$1 %08.0f xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx end" 1 "$3"
echo "$1 end $$" >"$2/events"
