"""What is shown of a data set that a disk has no room for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from ptpipe.execution.causes import cause
from ptpipe_torch import ArrayColumn, ArrayInfo, Data, DatasetInfo, Regression, Split

inputs, targets = (ArrayColumn(np.zeros((1000, width), np.float32)) for width in (50, 1))
task = Regression(target_names=("y",), mean=(0,), std=(1,))
ids = np.array([f"train/{number}" for number in range(1000)])
split = Split(ids, {"x": inputs}, {next(iter(task.targets)): targets})
data = Data(DatasetInfo("zeros", {"x": ArrayInfo(dtype="float32", shape=(50,))}, task), {"train": split})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    data.save(Path(sys.argv[1]))
except OSError as error:
    print(cause(error))
"""


def test_numpy_drops_the_reason_and_the_cause_says_it(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    words = "a file could not be written to its end, as on a full disk: OSError: 50000 requested and "
    assert ended.stdout.startswith(words), ended
