"""The one list of fields that are accepted and not honoured yet.

A field leaves this list in the change that honours it, so that nothing is ever ignored in silence.
"""

from torchrun_api.job import TorchrunJobSpec
from torchrun_api.queue import TorchrunQueueSpec


def not_yet_supported(job: TorchrunJobSpec, queue: TorchrunQueueSpec) -> tuple[str, ...]:
    """What the job and its queue ask for in vain, one sentence each; () if all is honoured.

    For the message of the condition NotYetSupported.
    """
    if queue.parent_kai_queue is not None and queue.kai_queue is None:
        return (
            "queue spec.parentKaiQueue: without spec.kaiQueue there is no queue to be its child",
        )
    return ()
