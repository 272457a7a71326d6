"""How trainers of the world print their steps, and what only looks like one: lines in the forms that programs use."""

import pytest

from orchestrator.logscan import Scanner, StepEvent

BAR = "\r  {0}%|{1:<10}| {2}/200 [00:12<00:40,  9.55it/s]"


def steps(text):
    scanner = Scanner()
    events = scanner.feed(text if isinstance(text, bytes) else text.encode(), 100.0) + scanner.finish(100.0)
    return [event for event in events if isinstance(event, StepEvent)], scanner.summary()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[2026-11-29 14:00:01,123][INFO] epoch 3 | step 120/5000 | loss: 2.31 | 1,234 tok/s | lr 1e-4",
         (120, 2.31, 1234.0, 1e-4, None)),
        ("iter 10: loss 2.3025, time 12.31ms, mfu 3.21%", (10, 2.3025, None, None, None)),
        ("step 250: train loss 3.1210, val loss 3.4567", (250, 3.121, None, None, None)),
        ("[titan] 2026-11-29 14:00:01,123 - root - INFO - step: 10  loss:  8.1234  grad_norm:  1.2345  "
         "memory: 12.34GiB(12.99%)  tps: 1,234  tflops: 12.34  mfu: 3.96%", (10, 8.1234, 1234.0, None, 1.2345)),
        ("1|12|Loss: 1.2345678:  23%|##3       | 12/51 [00:12<00:40,  1.03s/it]", (12, 1.2345678, None, None, None)),
        ("Step 12 | loss:1.2345 lr:2e-05 tokens_per_second_per_gpu:1234.5 grad_norm:1.2",
         (12, 1.2345, 1234.5, 2e-5, 1.2)),
        (" iteration       10/     100 | consumed samples:          160 | elapsed time per iteration (ms): 412.3 | "
         "learning rate: 1.500E-04 | global batch size:    16 | lm loss: 2.301234E+00 | loss scale: 1.0 | "
         "grad norm: 1.234 | number of skipped iterations:   0 |", (10, 2.301234, None, 1.5e-4, 1.234)),
        ("[2026-11-29 14:00:01,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, "
         "lr=[1.5e-05, 1.5e-05], mom=[(0.9, 0.999), (0.9, 0.999)]", (10, None, None, 1.5e-5, None)),
        ("steps: 10 loss: 2.3456 iter time (s): 0.412 samples/sec: 38.812", (10, 2.3456, None, None, None)),
        ("Epoch 3:  23%|##3       | 120/500 [00:12<00:40,  9.55it/s, v_num=3, train_loss=2.31]",
         (120, 2.31, None, None, None)),
        ("Epoch 3:  23%|██▎       | 120/500 [00:12<00:40,  9.55it/s, v_num=3]", (120, None, None, None, None)),
        ("Training:  23%|##3       | 120/500 [00:12<00:40,  9.55it/s]", (120, None, None, None, None)),
        ("Epoch: [3][ 120/5000]  Time  0.412 ( 0.431)  Loss 2.3124e+00 (2.4210e+00)  Acc@1  45.31 ( 42.17)",
         (120, 2.3124, None, None, None)),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.310523", (640, 2.310523, None, None, None)),
        ("loss: 2.301234  [   64/60000]", (64, 2.301234, None, None, None)),
        ("Epoch [3/10], Step [120/500], Loss: 2.3100", (120, 2.31, None, None, None)),
        ("120/500 ━━━━━━━━━━━━━━━ 12s 25ms/step - accuracy: 0.1234 - loss: 2.3123", (120, 2.3123, None, None, None)),
        ("I1129 14:00:01.123456 140123 train.py:88] step: 120 loss: 2.31", (120, 2.31, None, None, None)),
        ("2026-11-29 14:00:01.123 | INFO     | train:main:88 - Step 120/5000, loss=2.31, lr=1e-4, 1234 tokens/s",
         (120, 2.31, 1234.0, 1e-4, None)),
        ("[11/29 14:00:01 train.loop]:  eta: 0:12:12  iter: 19  total_loss: 1.25  lr: 0.00012  max_mem: 2000M",
         (19, 1.25, None, 1.2e-4, None)),
        ('{"loss": 1.2, "tokens_per_second": 1.2e3, "step": 3, "lr": 1e-4}', (3, 1.2, 1200.0, 1e-4, None)),
        ('{"time": "2026-11-29T14:00:00Z", "level": "info", "metrics": {"train/loss": 1.2, "train/step": 3}}',
         (3, 1.2, None, None, None)),
        ('{"event":"progress","data":{"train_loss":1.2,"global_step":"3"}}', (3, 1.2, None, None, None)),
        ('2026-11-29 14:00:01 | INFO | train_inner | {"epoch": 1, "update": 0.12, "loss": "2.31", "wps": "1234", '
         '"num_updates": "120", "lr": "0.0001", "gnorm": "1.2"}', (120, 2.31, 1234.0, 1e-4, 1.2)),
        ("step=12 loss=2.3 tokens/sec/gpu=1234", (12, 2.3, 1234.0, None, None)),
        ("step=12 loss=2.3 tok/s: 12.3 K", (12, 2.3, 12300.0, None, None)),
        ("step=12 tokens per second: 310 avg_loss=2.3", (12, 2.3, 310.0, None, None)),
        ("step=12 loss=2,31", (12, None, None, None, None)),
        ("step=12 loss=N/A", (12, None, None, None, None)),
    ],
)  # fmt: skip
def test_a_step_line_as_programs_print_it(line, expected):
    (step,), _ = steps(line + "\n")
    assert (step.step, step.loss, step.tok_s, step.lr, step.grad_norm) == expected


@pytest.mark.parametrize(
    "line",
    [
        "step 3 of the installation", "Step 3/5 : RUN pip install torch", "step 3/5 - Download model", "STEP 3: losses",
        "Total optimization steps = 5,000", "  Num steps = 5000", "Training for 5000 steps", "time per step: 0.12",
        "config: {'step': 3, 'lr': 0.1}", "args: Namespace(step=3, lr=0.1)", "warmup_steps=100 step_size=3",
        "Epoch 3/10", "epoch 3 finished", "Epoch 3/10 loss: 2.3", "Epoch [3/10] loss: 2.3", "[Epoch 3/10] loss: 2.3",
        "11/29/2026 14:00:01 loss: 2.3", "[11/29 14:00:01] loss: 2.3", "11/29 14:00:01 loss 2.3", "batch=32 loss: 2.3",
        "gpu memory [12/80] loss 2.3", "saved checkpoint at step 12", "loaded checkpoint of step=500",
        "eval step 3/100 loss 2.3", "[eval] step=12 loss=2.3", "Validation: step=12 loss=2.3", "val loss=2.3 step 3",
        "Evaluating:  23%|##3       | 12/50 [00:12<00:40,  9.55it/s, loss=2.3]", "Test set: Average loss: 0.05 [3/10]",
        "Map:  23%|##3       | 120/500 [00:12<00:40, 955.12 examples/s]",
        "Loading checkpoint shards:  50%|#####     | 1/2 [00:02<00:02,  2.01s/it]",
        " 23%|##3       | 120/500 [00:12<00:40,  9.55it/s]",
        "Downloading model.safetensors:  23%|##3       | 120M/500M [00:12<00:40, 9.55MB/s]",
        "{'eval_loss': 2.1, 'eval_runtime': 3.2, 'epoch': 1.0}", "step -3 loss 2", "lr=1e-4 loss=2.3",
    ],
)  # fmt: skip
def test_what_is_no_step(line):
    found, summary = steps(line + "\n")
    assert found == [] and summary.step is None


@pytest.mark.parametrize("line", ["Test set: Average loss: 0.05, Accuracy: 9810/10000", "eval loss: 2.1", "val loss 3"])
def test_a_loss_of_an_evaluation_is_not_the_runs(line):
    assert steps(f"step=1 loss=5.0\n{line}\n")[1].loss == 5.0


def test_a_nameless_bar_is_the_trainings_once_a_loss_is_printed_between_its_frames():
    loading = "\r 50%|#####     | 500/1000 [00:01<00:01, 900it/s]\r100%|##########| 1000/1000 [00:02<00:00, 900it/s]\n"
    training = "".join(BAR.format(n // 2, "#", n) for n in range(1, 10))
    logged = f"\r{' ' * 60}\r{{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}}\n"
    after = "".join(BAR.format(n // 2, "#", n) for n in range(10, 13))
    evaluation = "\r  8%|#         | 2/25 [00:00<00:01, 20.1it/s]\r{'eval_loss': 2.1, 'epoch': 0.1}\n"
    assert steps(loading + training)[0] == []
    found, summary = steps(loading + training + logged + after + evaluation + BAR.format(100, "#", 200))
    assert [(one.step, one.loss, one.lr) for one in found] == [
        (9, 2.31, 5e-5), (10, None, None), (11, None, None), (12, None, None), (200, None, None),
    ]  # fmt: skip
    assert (summary.step, summary.loss) == (200, 2.31)


@pytest.mark.parametrize(
    ("line", "worker"),
    [
        ("[default0]:step=3 loss=2", "default0"), ("[rank1]:2026-11-29 14:00:01 INFO step=3 loss=2", "rank1"),
        ("rank=1 step=3 loss=2", "rank1"), ('{"rank": 0, "step": 3}', "rank0"), ("local_rank=2 step=3", "rank2"),
        ("Rank 0: step 3 loss 2", "Rank 0"), ("lora_rank=8 step=3", None), ("[0] step=3", None),
    ],
)
def test_who_steps(line, worker):
    (step,), _ = steps(line + "\n")
    assert (step.step, step.worker) == (3, worker)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "latin-1", "utf-8-sig"])
def test_bytes_that_are_not_utf_8_cost_no_step(encoding):
    found, _ = steps("größer\nstep=3 loss=2,5 µ=1\nstep=4 loss=2.5\n".encode(encoding))
    assert [one.step for one in found] == [3, 4]


def test_two_threads_on_one_line_are_at_least_one_step():
    found, _ = steps("worker=drafter-0 step=3 loss=2.0worker=drafter-1 step=4 loss=2.0\n\nworker=drafter-0 step=5\n")
    assert {one.step for one in found} >= {3, 5}
