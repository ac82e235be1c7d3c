"""The machines that are shipped, as data: who measured what of each, and from which like machine the rest is scaled.

A new machine is a new entry of MACHINES. What names a `hardware`, an `interconnect` or a source S.. is a key of the
data folder's files; every other number stands here with its source. Rates of links are bytes per second, one way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tpplan.machine.tables import Source

MIB = 1024**2

# --- what an entry is made of --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one GPU sends at most. A time that is not latency goes with 1 / bytes_per_s."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRows:
    """Rows of collectives.csv that are this machine's. A row of these sources on another interconnect is an error."""

    hardware: tuple[str, ...]
    interconnects: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFabric:
    """A measurement across nodes on another fabric: never mixed in, but it shows how far scaling by links can be off.

    The like machine's group of the same shape is scaled from its own link to `link`, and compared.
    """

    rows: CollectiveRows
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Memory bandwidth as measured: the row of hardware.csv."""

    hardware: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfPeak:
    """Memory bandwidth that nobody measured: the peak, times the median share of it that other machines reach."""

    peak_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRate:
    """bfloat16 FLOP/s of the best large product: the row of hardware.csv."""

    hardware: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimited:
    """The like machine's best rate under less power: it falls with (watts / its watts) ** e.

    e is that of a pair of parts with one chip and two power limits, rows of hardware.csv.
    """

    watts: float
    like_watts: float
    pair: tuple[str, str]
    pair_watts: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMatmuls:
    """The grid of matmul.csv under this hardware and source."""

    hardware: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareRows:
    """Rows of matmul.csv that no grid is made of: times that check a scaled one of dtype."""

    hardware: str
    dtype_in_file: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareRatios:
    """Rows of a dtype that no grid has, for this machine and for its like one: ratios that check the scaling."""

    hardware: str
    like_hardware: str
    dtype_in_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMisaligned:
    """float16 TFLOP/s of large products, by the bytes that their rows begin at multiples of, and of aligned ones.

    relative_error: how far the further time of a FLOP in smaller products is from that. unlike_error: of another kind
    of GPU, which nobody measured.
    """

    hardware: str
    tflops: Mapping[int, float]
    aligned_tflops: float
    relative_error: float
    unlike_error: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBatched:
    """float16 TFLOP/s of batches of products (m, k) @ (k, n), by a size that is smaller than the others, which are as
    large as the last: k (inner), or n (outer). relative_error: of single products from these."""

    hardware: str
    sizes: tuple[int, ...]
    inner_tflops: tuple[float, ...]
    outer_tflops: tuple[float, ...]
    relative_error: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAttention:
    """TFLOP/s of FlashAttention-2 at shapes of training."""

    forward_tflops: tuple[float, ...]
    backward_tflops: tuple[float, ...]
    how: str
    sources: tuple[str, ...]
    #: where another kernel may run than the one that was published
    least_relative_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAttention:
    """The best TFLOP/s of FlashAttention-2 at any shape; the median over shapes is taken from the like machine."""

    forward_tflops: float
    backward_tflops: float
    how: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One profile. What is None is scaled from the machine that `like` names, for the reason that `because` gives."""

    name: str
    device: str
    memory_bytes: int
    memory_source: Source
    memory_inferred: str | None = None
    bandwidth: Achieved | ShareOfPeak
    compute: BestRate | PowerLimited
    in_node: Link
    across_nodes: Link
    #: whether switches add up inside a node (NVLink SHARP): an all_reduce of the whole node then beats a ring
    switch_reduces: bool
    collectives: tuple[CollectiveRows, ...] = ()
    other_fabric: OtherFabric | None = None
    matmuls: MeasuredMatmuls | None = None
    spare_matmuls: SpareRows | SpareRatios | None = None
    attention: PublishedAttention | BestAttention | None = None
    like: str | None = None
    because: str = ""
    notes: tuple[str, ...] = ()
    gpus_per_node: int = 8


# --- sources that are not in the data folder -----------------------------------------------------------------------

FACT = "a fact; nothing bundled"
DATA_SHEETS, ML_ENGINEERING = "NVIDIA-data-sheets", "ML-engineering"

SIZING, SIZING_BATCHES = "Transformer-sizing", "Transformer-sizing-batches"

CITED_SOURCES = (
    Source(
        id="FA3",
        licence="two medians of published figures; nothing bundled",
        source="FlashAttention-3, arXiv:2407.08608, figures 5 and 6: the baseline FlashAttention-2, H100 80GB SXM5"
        " (bar labels as third parties transcribed the figures; the paper itself was not at hand)",
    ),
    Source(
        id="FA2",
        licence="one published figure, as a check; nothing bundled",
        source="FlashAttention-2, arXiv:2307.08691: up to 335 TFLOP/s forward + backward on H100 (not looked up)",
    ),
    Source(
        id="FA2-A100",
        licence="two published figures; nothing bundled",
        source="FlashAttention-2, arXiv:2307.08691, sections 1 and 4: on an A100 80GB SXM4 up to 230 TFLOP/s forward,"
        " and up to 63 % of the theoretical maximum (312 TFLOP/s) backward (read in a transcribed text of the paper)",
    ),
    Source(
        id="FA2-B200-64",
        licence="a median of eight published figures; nothing bundled",
        source="https://github.com/Dao-AILab/flash-attention/issues/1589: flash_attn 2.7.4 on a B200, head dim 64",
    ),
    Source(
        id="FA2-B200-128",
        licence="a median of eight published figures; nothing bundled",
        source="https://github.com/meta-pytorch/tritonbench/pull/171: flash_v2 on a B200, head dim 128, forward",
    ),
    Source(
        id=ML_ENGINEERING,
        licence="CC-BY-SA-4.0; ratios of published figures, no table bundled",
        source="https://github.com/stas00/ml-engineering (744d01e18b79), compute/accelerator/README.md: best bfloat16"
        " rates of a search over shapes (mamf-finder), and peaks of memory bandwidth",
    ),
    Source(
        id=SIZING,
        licence="medians of published figures; nothing bundled",
        source="https://github.com/EleutherAI/cookbook (27dff48d595f), sizing/results: vocab_v_sweep.out (8192 x 14336"
        " by 14336 x 51136 to 51220), and for the error h_sweep.out (attention's products, head dims 128 to 148) and"
        " mm/ksweep_low/a100.out (27648 x 64 to 436 by 4096), float16 on an A100",
    ),
    Source(
        id=SIZING_BATCHES,
        licence="medians of published figures; nothing bundled",
        source="https://github.com/EleutherAI/cookbook (27dff48d595f), sizing/results: h_sweep.out (64 products of"
        " attention at 2048 tokens, medians of head dims 128 to 144, 160 to 176, 208 to 224, 248 to 264, 360 to 376,"
        " 496 and 504, multiples of 8) and bmm/bsweep/a100.out (64 x 2048 x 2048 x 2048), float16 on an A100",
    ),
    Source(
        id=DATA_SHEETS,
        licence=FACT,
        source="NVIDIA's data sheets, as third parties quote them: NVLink both ways 600 GB/s (A100), 900 GB/s (H100,"
        " H200), 1800 GB/s (B200); network per GPU 200 Gb/s (DGX A100), 400 Gb/s (DGX H100, H200, B200); memory of the"
        " A100 SXM 40GB 1555 GB/s; power 300 W (A100 PCIe 80GB), 400 W (A100 SXM), 700 W (H100 SXM)",
    ),
)


def nvidia_smi(device: str, mebibytes: int) -> Source:
    """The source of a memory size."""
    return Source(id="nvidia-smi", licence=FACT, source=f"nvidia-smi on an {device}: {mebibytes} MiB")


# --- the entries ---------------------------------------------------------------------------------------------------

NVLINK3 = Link(name="NVLink3", bytes_per_s=300e9)
NVLINK4 = Link(name="NVLink4", bytes_per_s=450e9)
NVLINK5 = Link(name="NVLink5", bytes_per_s=900e9)
RDMA_200 = Link(name="200 Gb/s per GPU", bytes_per_s=25e9)
RDMA_400 = Link(name="400 Gb/s per GPU", bytes_per_s=50e9)
EFA_100_BY_2 = Link(name="EFA, 4 x 100 Gb/s per node of 8", bytes_per_s=6.25e9)

#: XLA's table of collectives, alone in measuring pairs of GPUs
XLA_COLLECTIVES = "S01"
H100_NCCL_SOURCES = ("S03", *(f"S{i:02d}" for i in range(5, 11)), *(f"S{i:02d}" for i in range(15, 26)))
H100_RDMA = "RDMA, 400Gb/s per GPU INFERRED from 48.8 GB/s busbw at 1 GPU/node"
XLA_MATMULS = "S26"
A100_SXM, A100_PCIE, H100_SXM, H200_SXM = "A100 SXM 80GB", "A100 PCIe", "H100 SXM 80GB", "H200 SXM"

MISALIGNED = PublishedMisaligned(
    hardware=A100_SXM,
    tflops={8: 139.8, 4: 138.4, 2: 74.1},
    aligned_tflops=255.4,
    relative_error=0.4,
    unlike_error=0.5,
    source=SIZING,
)

#: Single products of the 17 head dims take 0.83 to 1.6 times as long as by these (root of the mean square of the
#: logarithms: 0.11). The error has 0.17 more for the memory, which is not stated: that of 80 GB is 1.24 times as fast.
BATCHED = PublishedBatched(
    hardware=A100_SXM,
    sizes=(136, 168, 216, 256, 368, 500, 2048),
    inner_tflops=(91.6, 103.7, 114.0, 124.3, 184.2, 194.6, 250.5),
    outer_tflops=(127.1, 144.7, 178.8, 131.5, 176.7, 226.1, 250.5),
    relative_error=0.2,
    source=SIZING_BATCHES,
)

COUNTING = "bytes: the whole value over all ranks of a group; for all_to_all ranks x nccl-tests' size, else its size"

MACHINES = (
    Machine(
        name="h100-sxm",
        device="NVIDIA H100 SXM 80GB",
        memory_bytes=81559 * MIB,
        memory_source=nvidia_smi("H100 80GB HBM3", 81559),
        bandwidth=Achieved(hardware=H100_SXM, source="S03"),
        compute=BestRate(hardware=H100_SXM),
        in_node=NVLINK4,
        across_nodes=RDMA_400,
        switch_reduces=True,
        collectives=(
            CollectiveRows(
                hardware=(H100_SXM, "H100 (XLA key sm_90; SKU not stated)"),
                interconnects=(
                    "NVLink4/NVSwitch",
                    "NVLink4/NVSwitch (1 host, 8 GPU)",
                    "EFAv2 3200Gb/node (p5)",
                    H100_RDMA,
                ),
                sources=(XLA_COLLECTIVES, *H100_NCCL_SOURCES),
            ),
        ),
        matmuls=MeasuredMatmuls(hardware="H100 (XLA key sm_90; SKU not stated)", source=XLA_MATMULS),
        attention=PublishedAttention(
            # Sequences of 1k, 2k, 4k, 8k: head dims 64, 64 causal, 128, 128 causal, 256, 256 causal.
            forward_tflops=(
                *(306, 318, 321, 322),
                *(229, 262, 284, 295),
                *(350, 362, 368, 370),
                *(260, 298, 319, 333),
                *(313, 321, 323, 324),
                *(251, 278, 293, 297),
            ),
            # Head dims 64 and 128.
            backward_tflops=(*(238, 264, 279, 287), *(260, 291, 310, 318)),
            how="not in the data: median of published FlashAttention-2 in float16, head dims 64-256, sequences 1k-8k,"
            " causal and not; relative_error is the farthest of them",
            sources=("FA2", "FA3"),
        ),
        notes=(
            "collectives: groups across nodes come from different clusters (S15: EFA; S18-S25: RDMA, 400 Gb/s per GPU"
            " inferred), one GPU per network port",
            "collectives: pairs in a node come from S01 alone, which is slower than nccl-tests where both measured"
            " (large all_reduce, reduce_scatter); their relative_error includes that",
        ),
    ),
    Machine(
        name="h200-sxm",
        device="NVIDIA H200 SXM 141GB",
        memory_bytes=143771 * MIB,
        memory_source=nvidia_smi("H200", 143771),
        bandwidth=Achieved(hardware=H200_SXM, source="S04"),
        compute=BestRate(hardware=H200_SXM),
        in_node=NVLINK4,
        across_nodes=RDMA_400,
        switch_reduces=True,
        collectives=(CollectiveRows(hardware=(H200_SXM,), interconnects=("NVLink4/NVSwitch",), sources=("S04",)),),
        spare_matmuls=SpareRatios(hardware=H200_SXM, like_hardware=H100_SXM, dtype_in_file="fp8"),
        like="h100-sxm",
        because="the same chip and links with faster memory",
        notes=(
            "measured: memory size and bandwidth, and all_reduce of 8 ranks in a node (S04); all else is h100-sxm's,"
            " with what is bound by memory scaled by bandwidth",
        ),
    ),
    Machine(
        name="a100-sxm-80gb",
        device="NVIDIA A100 SXM 80GB",
        memory_bytes=81920 * MIB,
        memory_source=nvidia_smi("A100-SXM4-80GB", 81920),
        bandwidth=Achieved(hardware=A100_SXM, source="S02"),
        compute=BestRate(hardware=A100_SXM),
        in_node=NVLINK3,
        across_nodes=RDMA_200,
        switch_reduces=False,
        collectives=(CollectiveRows(hardware=(A100_SXM,), interconnects=("NVLink3/NVSwitch",), sources=("S02",)),),
        other_fabric=OtherFabric(
            rows=CollectiveRows(hardware=(A100_SXM,), interconnects=("EFA 4x100Gb/node (p4de)",), sources=("S15",)),
            link=EFA_100_BY_2,
        ),
        spare_matmuls=SpareRows(hardware=A100_SXM, dtype_in_file="fp16", dtype="float16"),
        attention=BestAttention(
            forward_tflops=230,
            backward_tflops=0.63 * 312,
            how="not in the data: the best published FlashAttention-2 on this part (230 TFLOP/s forward, 63 % of 312"
            " backward), times median over best of the shapes that were published for h100-sxm",
            sources=("FA2-A100", "FA3"),
        ),
        like="h100-sxm",
        because="the generation before: NVLink3 for NVLink4, 200 for 400 Gb/s per GPU, no reduction in the switch",
        notes=(
            "measured: memory size and bandwidth, all_reduce of 8 ranks in a node (S02); FlashAttention-2's best"
            " rates are published; matmuls and all other collectives are scaled from h100-sxm",
            "across nodes: 200 Gb/s per GPU, as in a DGX A100, and nobody's measurement. On AWS p4de, with a quarter of"
            " that (EFA, 4 x 100 Gb/s per node), all_reduce of 16 ranks was measured (S15): another fabric, so it is"
            " not mixed in, and serves as the error of scaling by links. Measure a cluster of another fabric yourself",
        ),
    ),
    Machine(
        name="a100-sxm-40gb",
        device="NVIDIA A100 SXM 40GB",
        memory_bytes=40960 * MIB,
        memory_source=nvidia_smi("A100-SXM4-40GB", 40960),
        bandwidth=ShareOfPeak(peak_bytes_per_s=1.555e12, source=DATA_SHEETS),
        compute=BestRate(hardware=A100_SXM),
        in_node=NVLINK3,
        across_nodes=RDMA_200,
        switch_reduces=False,
        like="a100-sxm-80gb",
        because="the same chip and links with slower memory",
        notes=(
            "measured: memory size alone; all else is a100-sxm-80gb's, with what is bound by memory scaled by"
            " bandwidth",
        ),
    ),
    Machine(
        name="b200",
        device="NVIDIA B200 SXM 180GB",
        memory_bytes=183359 * MIB,
        memory_source=nvidia_smi("B200", 183359),
        bandwidth=ShareOfPeak(peak_bytes_per_s=8.0e12, source=ML_ENGINEERING),
        compute=BestRate(hardware="B200 SXM"),
        in_node=NVLINK5,
        across_nodes=RDMA_400,
        switch_reduces=True,
        collectives=(
            CollectiveRows(
                hardware=("B200",), interconnects=("NVLink5/NVSwitch (1 host, 8 GPU)",), sources=(XLA_COLLECTIVES,)
            ),
        ),
        matmuls=MeasuredMatmuls(hardware="B200", source=XLA_MATMULS),
        attention=PublishedAttention(
            # Sequences of 1k, 2k, 4k, 8k, not causal: head dim 64 (issue 1589), head dim 128 (tritonbench).
            forward_tflops=(*(359.3, 380.99, 306.94, 343.07), *(315.1, 352.1, 353.9, 361.6)),
            # Head dim 64.
            backward_tflops=(280.64, 301.61, 314.71, 329.09),
            how="not in the data: median of published FlashAttention-2, head dims 64 and 128, sequences 1k-8k, not"
            " causal. Kernels written for Blackwell (cuDNN, FlashAttention-4) are published at 2 to 4 times that, and"
            " torch may pick one: relative_error reaches to 3 times",
            sources=("FA2-B200-64", "FA2-B200-128"),
            least_relative_error=2 / 3,
        ),
        like="h100-sxm",
        because="the generation after, in nodes with the same network",
        notes=(
            "measured: matmuls (S26), and all collectives in a node (S01, which on H100 is slower than nccl-tests;"
            " relative_error includes that); FlashAttention-2's rates are published",
            "across nodes: 400 Gb/s per GPU, as in a DGX B200: h100-sxm's times, and nobody's measurement. GB200's"
            " racks, where NVLink crosses hosts, are another fabric",
        ),
    ),
    Machine(
        name="h100-96gb-hbm2e",
        device="NVIDIA H100 SXM 96GB HBM2e, 500 W",
        memory_bytes=97871 * MIB,
        memory_source=nvidia_smi("H20 96GB", 97871),
        memory_inferred="memory_bytes: that of another part with 96 GB",
        bandwidth=ShareOfPeak(peak_bytes_per_s=2.4e12, source="S28"),
        compute=PowerLimited(watts=500, like_watts=700, pair=(A100_PCIE, A100_SXM), pair_watts=(300, 400)),
        in_node=NVLINK4,
        across_nodes=RDMA_400,
        switch_reduces=True,
        like="h100-sxm",
        because="the same chip and links with slower memory and less power",
        notes=(
            "measured: nothing on this part; what it is made of is published (S28: 96 GB of HBM2e at 2.4 TB/s, 500 W,"
            " NVLink, 400 Gb/s per GPU). All is scaled from h100-sxm: large matmuls and attention by power, what is"
            " bound by memory by bandwidth",
            "S28 places the peak rate of this part between SXM's and NVL's, 0.84 to 1 of SXM's by their data sheets",
        ),
    ),
)
