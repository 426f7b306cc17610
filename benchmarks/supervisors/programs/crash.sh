# A service that ends at once with an error.
echo "$1 start $$" >"$2/events"
exit 1
