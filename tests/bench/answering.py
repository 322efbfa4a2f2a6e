"""The function of a process in test_sweep.py, without imports that take seconds in every process."""

import os
import time
from multiprocessing.connection import Connection


def answer(requests: Connection) -> None:
    """Answer, sleep, or die."""
    while True:
        do, *sleep = requests.recv()
        if do == "die":
            os._exit(3)
        time.sleep(*sleep or [0])
        requests.send({"said": do, "is_last": do == "last"})
