"""One gang, from its creation to its end.

A job is a TorchrunJob. A gang is the pods that run the job together, one for each of its nodes. An
attempt is one gang's try to finish the job. It has a number and one Indexed Job, the child Job (two
if the head has its own pod). A new gang is a new attempt. A round is one start of the ranks of all
nodes, in the pods of one attempt.

For example, job `train` has two nodes. Job `train` with pods 0 and 1 is attempt 0, and their first
ranks are round 0. A rank fails, and the launchers start all ranks again in the same pods: attempt
0, round 1, and `status.restartsInPlace` is 1. Then the machine of pod 1 is lost. Job `train-r1`
with two new pods is attempt 1, which begins with round 0, and `status.disruptions` is 1.
"""
