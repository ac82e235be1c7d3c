"""Names of the parts of a step's time and of a rank's peak memory, as plans and reports give them."""

# Parts of the time: kernels, tensor-parallel collectives, FSDP's and replicas' collectives where no compute hides them
COMPUTE, TENSOR_PARALLEL, DATA_PARALLEL = "compute", "tensor-parallel collectives", "exposed data-parallel collectives"
TP_REDUCTION, OPTIMIZER = "tensor-parallel gradient reduction", "optimizer"
FSDP_COPIES = "copies of FSDP"
ACCUMULATION, ISSUE = "gradient accumulation", "waiting for the CPU"
#: kernels of forward that run again in backward
RECOMPUTATION = "recomputation"

# Parts of the memory: what rests, what FSDP gathers, what autograd keeps, and what lives while an op runs
PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
UNSHARDED_PARAMETERS, UNSHARDED_GRADIENTS = "unsharded parameters", "unsharded gradients"
SAVED, SOURCES = "saved activations", "inputs and buffers"
TRANSIENTS, BUFFERS = "transients", "collective buffers"
#: what the framework and its allocator hold beside what is predicted
SLACK = "slack"
