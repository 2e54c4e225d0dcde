"""What Docker has added to the rules of iptables is removed again, and nothing else."""

from torchrun_cluster.dockerd import forward_policy, without_docker

SAVED = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
-A INPUT -i docker0x -j ACCEPT
-A FORWARD -j DOCKER-USER
-A FORWARD -o br-1234 -j DOCKER
-A FORWARD -i docker0 ! -o docker0 -j ACCEPT
-A FORWARD -i lo -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE
COMMIT
"""
OTHERS = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
-A INPUT -i docker0x -j ACCEPT
-A FORWARD -i lo -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
-A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE
COMMIT
"""


def test_rules_of_others_stay() -> None:
    assert without_docker(SAVED, {"docker0", "br-1234"}, "ACCEPT") == OTHERS
    assert without_docker(OTHERS, {"docker0"}, "ACCEPT") == OTHERS


def test_the_policy_of_forwarding_is_read() -> None:
    assert forward_policy(SAVED) == "DROP"
    assert forward_policy("") == "ACCEPT"
