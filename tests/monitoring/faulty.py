"""The controller with two bugs: it raises for jobs named panic, and hangs for jobs named hang.

python faulty.py FLAGS...
"""

import anyio

from torchrun_controller import __main__, manager
from torchrun_controller.controllers.controller import Outcome
from torchrun_controller.controllers.job import JobReconciler

attempt = JobReconciler.attempt


async def with_bugs(self: JobReconciler, key: tuple[str, str]) -> Outcome:
    if key[1] == "panic":
        raise ZeroDivisionError("a bug")
    if key[1] == "hang":
        await anyio.sleep_forever()
    return await attempt(self, key)


assert vars(manager)["JobReconciler"] is JobReconciler
JobReconciler.attempt = with_bugs  # type: ignore[method-assign]
__main__.main()
