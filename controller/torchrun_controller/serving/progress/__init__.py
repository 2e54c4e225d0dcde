"""Progress reports of workers: an authenticated port. `cache.progress_reports` keeps the newest
one.

    launcher --POST /v1/progress--> endpoint --token--> tokens --TokenReview--> API server
                                        |
                                     reports --> observe --> reconcile --> status

A report is repeated within seconds, so nothing is stored, retried or queued. Reports that are too
many, too early or sent to a standby are refused, and the sender tries again.
"""
