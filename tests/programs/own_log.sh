# A start script that names its own log, as they do. $1 is how it ends: "steps" or "dies".
exec >> "$LOG" 2>&1
n=0
while [ $n -lt 5 ] || [ "$1" = steps ]; do n=$((n + 1)); echo "step=$n loss=0.5 tok/s=700"; sleep 0.1; done
echo 'Traceback (most recent call last):'
echo '  File "train.py", line 3, in <module>'
echo 'ValueError: the error of today'
exit 7
