"""Names of the parts of a step's time and of a rank's peak memory, as plans and reports give them."""

# Parts of the time: kernels; collectives of tensor parallelism; collectives of FSDP and replicas that no compute hides
COMPUTE, TENSOR_PARALLEL, DATA_PARALLEL = "compute", "tensor-parallel collectives", "exposed data-parallel collectives"
#: rows of experts sent and returned
EXPERT_PARALLEL = "expert-parallel exchange"
TP_REDUCTION, OPTIMIZER = "tensor-parallel gradient reduction", "optimizer"
FSDP_COPIES = "copies of FSDP"
ACCUMULATION, ISSUE = "gradient accumulation", "waiting for the CPU"
#: kernels of forward that run again in backward
RECOMPUTATION = "recomputation"

# Parts of the memory: shards at rest, FSDP's gathered copies, tensors saved by autograd, temporaries of a running op
PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
UNSHARDED_PARAMETERS, UNSHARDED_GRADIENTS = "unsharded parameters", "unsharded gradients"
SAVED, SOURCES = "saved activations", "inputs and buffers"
TRANSIENTS, BUFFERS = "transients", "collective buffers"
#: of a model in stages: a rank's stages that do not run, and tensors received and sent
BESIDE = "other stages and tensors between stages"
#: memory of the framework and its allocator, beside the predicted parts
SLACK = "slack"
