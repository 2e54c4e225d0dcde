"""One gang, from its creation to its end.

A job is a TorchrunJob. A gang is the pods that run it together, one for each node of the job. An
attempt is one gang's try to finish the job: it has a number and an Indexed Job, the child Job, of
its own (two if the head has its own pods), and a new gang is a new attempt. A round is one start of
the ranks on all nodes, in the pods of one attempt. For example, job `train` with two nodes has Job
`train` with pods 0 and 1: attempt 0, round 0. A rank fails and the launchers start all ranks
again in the same pods: attempt 0, round 1, and `restartsInPlace` is 1. Then the machine of pod 1 is
lost: Job `train-r1` with two new pods is attempt 1, with round 0 again, and `disruptions` is 1.
"""
