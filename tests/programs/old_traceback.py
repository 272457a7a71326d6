"""Prints an older run's traceback, as a script that shows the last log's end would, and then steps."""

import time

print('''Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
RuntimeError: the error of yesterday''')
step = 0
while True:
    step += 1
    print(f"step={step} loss=1.5 tok/s=500")
    time.sleep(0.05)
