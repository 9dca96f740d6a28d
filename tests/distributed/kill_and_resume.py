"""An unbroken run of tiny against one that loses a random rank at a random step: python -m tests.distributed.kill_and_resume"""

import random
import sys
import tempfile
from pathlib import Path

from .jobs import finish, kill_rank_when, start_job, steps_done, weights_hash


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    rng = random.Random(seed)
    rank, step = rng.randrange(2), rng.randrange(1, 9)
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken = Path(folder, "unbroken"), Path(folder, "broken")
        finish(start_job(unbroken), unbroken)
        print(f"unbroken run:            {steps_done(unbroken)} steps, weights {weights_hash(unbroken)}", flush=True)
        job = start_job(broken)
        kill_rank_when(job, rank, lambda: steps_done(broken) >= step)
        print(f"seed {seed}: rank {rank} killed with -9 after step {steps_done(broken)}", flush=True)
        output = finish(start_job(broken), broken)
        print(*[line for line in output.splitlines() if "resuming" in line or "passed over" in line], sep="\n")
        print(f"killed and started again: {steps_done(broken)} steps, weights {weights_hash(broken)}")
        same = weights_hash(broken) == weights_hash(unbroken)
        print("same final weights" if same else "DIFFERENT final weights")
        sys.exit(not same)


if __name__ == "__main__":
    main()
