"""Objects that the CRDs refuse, with a part of each message."""

from typing import Any

from integration.bodies import git, job, queue, rule, workspace

GIT_FORMS = (
    "url of source git must be https://HOST/PATH or ssh://USER@HOST/PATH, without password, query"
    " or spaces (git@HOST:PATH is ssh://git@HOST/PATH; credentials are in secretRef)"
)
S3_FORMS = (
    "url of source s3 must be s3://BUCKET/PREFIX or https://ENDPOINT/BUCKET/PREFIX, without query"
    " or spaces (credentials are in secretRef)"
)
URL_PARTS = "url must not have '::', encoded control characters, or '.' or '..' as a component"
REF_FORM = (
    "ref must be the name of a branch or tag, or a commit with all its digits:"
    " no '..', '//' or '@{', no end in '/', '.' or '.lock'"
)
CLAIM_IS_THERE = (
    "size, storageClassName and accessMode must not be set with source existing, whose PVC exists"
    " already"
)
SOURCES: dict[str, tuple[dict[str, Any], str]] = {
    "git without url": (workspace(source="git"), "url is required with source git or s3"),
    "s3 without url": (workspace(source="s3"), "url is required with source git or s3"),
    "no claim": (workspace(source="existing"), "claimName is required with source existing"),
    "url of an upload": (
        workspace(source="zip", url="https://git.example/a.git"),
        "url may only be set with source git or s3: remove it or set one of these sources",
    ),
    "ref of a bucket": (
        workspace(source="s3", url="s3://code/a", ref="main"),
        "ref may only be set with source git: it is a branch, a tag or a commit",
    ),
    "folder of an upload": (
        workspace(subPath="a"),
        "subPath may only be set with source git or s3 or existing: an upload contains only the"
        " directory itself",
    ),
    "secret of a claim": (
        workspace(source="existing", claimName="c", secretRef={"name": "s"}),
        "secretRef may only be set with source git or s3: no other source uses credentials",
    ),
    "claim of a repository": (
        git(claimName="c"),
        "claimName may only be set with source existing: other sources create their own PVC",
    ),
    "image of a claim": (
        workspace(source="existing", claimName="c", image="i"),
        "image may only be set with source zip or git or s3: no other source has a sync pod",
    ),
    "delivery of a claim": (
        workspace(source="existing", claimName="c", delivery="direct"),
        "delivery may only be set with source zip or git or s3: no other workspace is delivered",
    ),
    "size of a claim": (
        workspace(source="existing", claimName="c", size="1Gi"),
        CLAIM_IS_THERE,
    ),
    "unknown source": (workspace(source="ftp"), "Unsupported value"),
    **{
        f"git {url}": (git(url=url), GIT_FORMS)
        for url in (
            "git@git.example:a.git",
            "ext::sh -c id",
            "file:///etc",
            "http://git.example/a.git",
            "https://user:password@git.example/a.git",
            "https://git.example/a b",
            "https://git.example/a?x=1",
            "ssh://-oProxyCommand=id/a",
            "--upload-pack=id",
            "https://git.example",
            "s3://code/a",
        )
    },
    **{
        f"s3 {url}": (workspace(source="s3", url=url), S3_FORMS)
        for url in (
            "https://git.example",
            "s3://",
            "s3://key:secret@code/a",
            "ftp://host/code/a",
            "s3://code/a?versionId=1",
        )
    },
    **{
        f"url with {part}": (git(url=f"https://git.example/{part}"), URL_PARTS)
        for part in ("../a", "a/..", "a/./b", "a%00b", "a%0Ab")
    },
    **{
        f"ref {ref}": (git(ref=ref), REF_FORM)
        for ref in ("a..b", "a//b", "a@{1}", "a/.b", "a.lock", "a/", "a.")
    },
    **{
        f"ref {ref}": (git(ref=ref), "spec.volumes.workspace.ref in body should match")
        for ref in ("--upload-pack=id", "-a", "a b", "a:b", "a^", "a~1", "*", "a\nb", "+a", "é")
    },
    **{
        f"subPath {path}": (git(subPath=path), "spec.volumes.workspace.subPath in body should")
        for path in ("/a", "a//b", "a\\b", "a\nb", "a/")
    },
    **{
        f"subPath {path}": (
            git(subPath=path),
            "subPath must not have '.' or '..' as a component",
        )
        for path in ("..", "a/../b", "./a", "a/.")
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **SOURCES,
    "no queue": (job(jobQueue=None), "spec.jobQueue: Required value"),
    "no command": (job(command=None), "spec.command: Required value"),
    "empty command": (job(command=""), "spec.command in body should be at least 1 chars long"),
    "empty argv": (job(command=[]), "spec.command in body should have at least 1 items"),
    "no size": (job(numNodes=None), "set exactly one of numNodes and numGPUs"),
    "two sizes": (job(numGPUs=8), "set exactly one of numNodes and numGPUs"),
    "no nodes": (job(numNodes=0), "should be greater than or equal to 1"),
    "a rule that can never match": (
        job(reliability={"rules": [{"action": "fail"}]}),
        "set at least one of exitCodes, signals and podConditions",
    ),
    "no restart and restarts": (
        job(reliability={"restartPolicy": "Never", "maxRestarts": 1}),
        "maxRestarts must be 0 or unset with restartPolicy Never",
    ),
    "no restart and a rule that restarts": (
        queue(reliability={"restartPolicy": "Never", "rules": [rule("ignore", signals=[9])]}),
        "the action of all rules must be fail with restartPolicy Never",
    ),
    "one exit code, two rules": (
        job(reliability={"rules": [rule("fail", exitCodes=[2, 3]), rule("ignore", exitCodes=[3])]}),
        "an exit code must be listed in at most one rule: the first match decides",
    ),
    "one signal, two rules": (
        job(reliability={"rules": [rule("fail", signals=[9]), rule("ignore", signals=[9])]}),
        "a signal must be listed in at most one rule: the first match decides",
    ),
    "one pod condition, two rules": (
        job(
            reliability={
                "rules": [rule("fail", podConditions=["A"]), rule("restart", podConditions=["A"])]
            }
        ),
        "a pod condition must be listed in at most one rule: the first match decides",
    ),
    "elastic and static": (
        job(
            elastic={"minNodes": 1, "maxNodes": 2},
            distributed={"rdzvBackend": "static"},
        ),
        "distributed.rdzvBackend must not be static with elastic: set it to c10d, the default",
    ),
    "head and elastic": (
        job(head={}, elastic={"minNodes": 2, "maxNodes": 2}),
        "head and elastic are mutually exclusive: a gang with a head has a fixed size",
    ),
    "head without workers": (
        job(head={}, numNodes=1),
        "numNodes must be at least 2 with head: the head and its workers",
    ),
    "head of GPUs": (
        job(head={}, numNodes=None, numGPUs=16),
        "numNodes must be at least 2 with head: the head and its workers",
    ),
    "two sizes of a claim": (
        queue(storage={"workspace": {"size": "1Gi", "sizePerGPU": "1Gi"}}),
        "size and sizePerGPU are mutually exclusive",
    ),
    "a size for a claim that exists": (
        job(volumes={"checkpoints": {"claimName": "a", "size": "1Gi"}}),
        "size, sizePerGPU and storageClassName must not be set with claimName, which is an"
        " existing PVC",
    ),
    "a claim and a directory": (
        job(volumes={"checkpoints": {"hostPath": "/var/c", "claimName": "a"}}),
        "claimName, storageClassName and accessMode must not be set with hostPath, which needs no"
        " PVC",
    ),
    "host network above its level": (
        queue(podSecurity="baseline", networking={"hostNetwork": True}),
        "networking.hostNetwork and podSecurity are mutually exclusive",
    ),
    "host path above its level": (
        queue(podSecurity="restricted", storage={"checkpoints": {"hostPath": "/var/c"}}),
        "storage.checkpoints.hostPath and podSecurity are mutually exclusive",
    ),
    "isolated on the host network": (
        queue(networking={"hostNetwork": True, "isolate": True}),
        "isolate and hostNetwork are mutually exclusive: a NetworkPolicy does not apply to pods in"
        " the host network",
    ),
    "KAI queue longer than a label": (queue(kaiQueue="a" * 64), "spec.kaiQueue: Too long"),
    "LocalQueue longer than a label": (
        queue(scheduling={"gang": "kueue", "queueName": "a" * 64}),
        "queueName must be no more than 63 characters with gang kueue, because it is a label value",
    ),
    "queue longer than a label": (
        {**queue(scheduling={"gang": "kueue"}), "metadata": {"name": "a" * 64}},
        "metadata.name must be no more than 63 characters with scheduling.gang kueue, because it"
        " is a label value: set scheduling.queueName to the LocalQueue or choose a shorter name",
    ),
    "no level": (queue(podSecurity="privileged"), "Unsupported value"),
    "negative quota": (queue(quota={"gpus": -1}), "should be greater than or equal to 0"),
    "unparsable quota": (queue(quota={"cpu": "many"}), "spec.quota.cpu"),
    "negative memory": (queue(quota={"memory": "-1Gi"}), "spec.quota.memory"),
    "negative weight": (queue(weight=-1), "should be greater than or equal to 0"),
    "no topology": (
        queue(scheduling={"topology": {"name": "a"}}),
        "set required, preferred, or both to the key of a label of Nodes, for example"
        " topology.kubernetes.io/zone",
    ),
    "elastic without start": (
        job(numNodes=None, numGPUs=8, elastic={"minNodes": 1, "maxNodes": 2}),
        "numNodes is required with elastic: it is the initial number of nodes",
    ),
    "start below elastic": (
        job(elastic={"minNodes": 3, "maxNodes": 4}),
        "numNodes must be between elastic.minNodes and elastic.maxNodes",
    ),
    "start above elastic": (
        job(elastic={"minNodes": 1, "maxNodes": 1}),
        "numNodes must be between elastic.minNodes and elastic.maxNodes",
    ),
    "elastic upside down": (
        job(elastic={"minNodes": 3, "maxNodes": 2}),
        "elastic.minNodes must be less than or equal to elastic.maxNodes",
    ),
    "long name": (
        job(name="a" * 46),
        "metadata.name must be no more than 45 characters, because the names of the pods are"
        " longer",
    ),
    "name that names no Service": (
        job(name="1a"),
        "metadata.name must be a DNS-1035 label (lowercase letters, digits and '-', starting with"
        " a letter), because a Service has this name",
    ),
    "name with a dot": (job(name="a.b"), "metadata.name must be a DNS-1035 label"),
    "unknown launcher": (job(launcher="mpirun"), 'supported values: "auto", "none", "torchrun"'),
    "relative directory": (job(workingDir="app"), "spec.workingDir in body should match"),
    "one variable twice": (
        job(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "Duplicate value",
    ),
    "unknown field": (job(nodes=2), 'unknown field "spec.nodes"'),
    "unknown nested field": (
        queue(nodeResources={"gpu": 8}),
        'unknown field "spec.nodeResources.gpu"',
    ),
    "no quantity": (
        queue(nodeResources={"memory": "512 GB"}),
        "spec.nodeResources.memory in body should match",
    ),
    "negative quantity": (
        queue(nodeResources={"cpus": -1}),
        "spec.nodeResources.cpus in body should be greater than or equal to 0",
    ),
    "priority above the limit": (
        queue(priority=5, limits={"maxPriority": 4}),
        "priority must be less than or equal to limits.maxPriority",
    ),
    "removed field of a job": (
        job(reliability={"podReplacement": "Pod"}),
        "Remove it: a lost pod leads to a new gang.",
    ),
    "removed field of a queue": (
        queue(resources=[{"name": "settings"}]),
        "Apply PVCs and ConfigMaps beside the queue, for example with kustomize.",
    ),
    "no whole GPUs": (queue(nodeResources={"gpus": 1.5}), "must be of type integer"),
}
