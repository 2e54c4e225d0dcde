"""Lines of NCCL's log, by version, and what they say.

The formats are in NCCL's src/transport (net.cc, net_socket.cc, net_ib), in the source of
aws-ofi-nccl and of Google's plugins. Lines marked "read" are from logs in public threads, the
others fill in the formats of that version.
"""

from typing import NamedTuple

PREFIX = "train-1-0:152:386 [0] NCCL INFO "


class Sample(NamedTuple):
    """version: of NCCL, and of a plugin. transport: name and device; None for no claim."""

    version: str
    lines: "tuple[str, ...]"
    transport: "tuple[str, str] | None"


SAMPLES = (
    Sample(
        "2.18.1",
        (
            "NET/IB : No device found.",
            "NET/Socket : Using [0]eth0:10.0.4.51<0>",
            "Using network Socket",
            "Channel 00/0 : 0[1a0] -> 1[1a0] [send] via NET/Socket/0",
        ),
        ("Socket", "eth0"),
    ),
    Sample(
        "2.18.1",
        (
            "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.4.51<0>",
            "Using network IB",
            "Channel 01/0 : 7[e0000] -> 8[10000] [send] via NET/IB/1(0)/GDRDMA",
        ),
        ("IB", ""),
    ),
    Sample(
        "2.12.7, aws-ofi-nccl 1.5.0, read",
        (
            "NET/OFI Using aws-ofi-nccl 1.5.0aws",
            "NET/OFI Selected Provider is efa (found 1 nics)",
            "Using network AWS Libfabric",
            "Channel 00/0 : 1[1e0] -> 0[1e0] [receive] via NET/AWS Libfabric/0/GDRDMA",
        ),
        ("AWS Libfabric", "efa"),
    ),
    Sample(
        "2.21.5, aws-ofi-nccl 1.9.2",
        (
            "NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)",
            "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0",
        ),
        ("AWS Libfabric", "tcp;ofi_rxm"),
    ),
    Sample(
        "2.22.3, read",
        (
            "Plugin Path : /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",
            "P2P plugin IBext_v8",
            "NET/IB : No device found.",
            "NET/Socket : Using [0]eno1:172.22.116.89<0> [1]ztyou3pbk2:192.168.193.155<0>",
            "Using network Socket",
            "Channel 00/0 : 17[1] -> 0[0] [receive] via NET/Socket/1",
        ),
        ("Socket", "ztyou3pbk2"),
    ),
    Sample(
        "2.24.3, IPv6",
        (
            "NET/Socket : Using [0]eth0:fe80::42:acff:fe11:2%eth0<0>",
            "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0/Shared",
        ),
        ("Socket", "eth0"),
    ),
    Sample(
        "2.26.2, HPC-X",
        (
            "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [RO]; OOB eth0:10.0.4.51<0>",
            "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IBext_v9/0/GDRDMA",
        ),
        ("IBext_v9", ""),
    ),
    Sample(
        "2.27.7, read",
        (
            "NET/IB : No device found.",
            "NET/IB : Using [RO]; OOB eth0:172.17.16.64<0>",
            "Failed to initialize NET plugin IB",
            "NET/Socket : Using [0]eth0:172.17.16.64<0>",
            "Initialized NET plugin Socket",
            "Assigned NET plugin Socket to comm",
            "Using network Socket",
            "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
        ),
        ("Socket", "eth0"),
    ),
    Sample(
        "2.28.9, aws-ofi-nccl 1.17.0, read",
        (
            "NET/Plugin: Loaded net plugin Libfabric (v11)",
            "Using network Libfabric",
            "NET/OFI Selected provider is efa, fabric is efa (found 3 nics)",
            "NET/OFI Using Libfabric version 2.4",
            "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Libfabric/2/GDRDMA(PCI)/Shared",
        ),
        ("Libfabric", "efa"),
    ),
    Sample(
        "2.28.9, GPUDirect-TCPXO",
        ("Channel 00/0 : 8[0] -> 0[0] [send] via NET/FasTrak/3/GDRDMA",),
        ("FasTrak", ""),
    ),
    Sample(
        "2.19.4, GPUDirect-TCPX",
        ("Channel 00/0 : 8[0] -> 0[0] [send] via NET/GPUDirectTCPX_v7/0",),
        ("GPUDirectTCPX_v7", ""),
    ),
    Sample(
        "2.30.7",
        (
            "NET/IB : Using [0]rocep1s0f0:1/RoCE [RO]; OOB eth0:10.0.4.51<0>",
            "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
        ),
        ("IB", ""),
    ),
    Sample(
        "2.32.3",
        (
            "NET/Socket : Using [0]eth0:10.0.4.51<0>",
            "Channel 00/0 : 0[0] -> 1[0] [receive] via NET/Socket/0/Shared",
        ),
        ("Socket", "eth0"),
    ),
    Sample(
        "2.32.3, a group inside of a node",
        (
            "Bootstrap: Using eth0:10.0.4.51<0>",
            "NET/Socket : Using [0]eth0:10.0.4.51<0>",
            "Using network Socket",
            "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
            "Channel 00 : 0[0] -> 1[1] via SHM/direct",
            "Connected NVLS tree",
        ),
        None,
    ),
    Sample("2.32.3, SHARP", ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA",), None),
    Sample("a later one", ("Channel 00/0 : 0 to 1 by Socket", "send via NET", "\ufffd"), None),
    Sample(
        "RCCL 2.22.3",
        (
            "NET/IB : No device found.",
            "NET/Socket : Using [0]ens51:10.1.1.2<0>",
            "Channel 00/0 : 8[8000] -> 0[0] [receive] via NET/Socket/0 comm 0x55eb nRanks 16",
        ),
        ("Socket", "ens51"),
    ),
)
