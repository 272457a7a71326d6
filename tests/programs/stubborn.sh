# Ignores HUP and TERM, and has two children that do so too, one of them in a session of its own.
trap '' HUP TERM
(trap '' HUP TERM; while :; do sleep 0.1; done) &
setsid sh -c 'trap "" HUP TERM; while :; do sleep 0.1; done' &
n=0
while :; do n=$((n + 1)); echo "step=$n tok/s=10"; sleep 0.1; done
