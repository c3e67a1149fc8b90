"""What is predicted: the order of the optimizers, and the published ablation that shows it at scale."""

# Output matrices of the MLP are fed by activations of low stable rank, so they are where a spectral update should pay
# first; then every hidden matrix. Losses should fall in this order.
EXPECTED_ORDER = ("adamw", "muon-out", "muon")

# Validation losses after 10,000 steps of a 160M-parameter decoder on FineWeb, from Wang et al. (arXiv 2509.26030), as
# quoted in the validation-loss table of Davis and Drusvyatskiy (arXiv 2512.04299).
PUBLISHED_LOSSES = {
    "relu2": {"adamw": 3.9242, "muon-out": 3.7023, "muon": 3.5654},
    "swiglu": {"adamw": 3.8837, "muon-out": 3.7843, "muon": 3.5125},
}
