"""The authenticated HTTP server for progress reports; `cache.progress_reports` stores them.

    launcher --POST /v1/progress--> endpoint --token--> tokens --TokenReview--> API server
                                        |
                                     reports --> observe --> reconcile --> status

The launcher sends a report every few seconds, so none is queued or retried here. A report over the
limits, or to a standby, is refused; the launcher sends the next one.
"""
