//! The list of templates: a new kernel is one file and one line here.

macro_rules! templates {
    ($($name:literal),* $(,)?) => {
        /// Every template: its name, and its text.
        pub const TEMPLATES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../wgsl/", $name, ".wgsl")))),*];
    };
}

templates! {
    "types",
    "pointwise",
    "fused",
    "pool",
    "resample",
    "strided_sum",
    "cross",
    "rotary",
    "recurrent",
    "cdist",
    "svd",
    "copy",
    "reduce",
    "scan",
    "rows",
    "softmax",
    "norm",
    "norm_weight",
    "batch_norm",
    "layer_norm",
    "part_sums",
    "attention",
    "attention_delta",
    "cross_entropy",
    "class_weights",
    "scale",
    "gelu_again",
    "embedding_grad",
    "embedding_bag",
    "gather",
    "place",
    "keys",
    "sort",
    "sort_merge",
    "sort_pick",
    "scatter",
    "scatter_runs",
    "places",
    "compact",
    "search",
    "random",
    "dropout",
    "drawn_words",
    "optim",
    "optim_rules",
    "optim_numbers",
    "optim_norm",
    "optim_scale",
    "amp_update",
    "math/philox",
    "math/normal",
    "matmul",
    "matmul_body",
    "matmul_sum",
    "conv",
    "windows",
    "windows_sum",
    "math/base",
    "math/exp",
    "math/double",
    "math/doubles",
    "math/doubles_trig",
    "math/log",
    "math/trig",
    "math/atrig",
    "math/pow",
    "math/erf",
    "math/ahyp",
    "math/mod",
    "math/gamma",
    "math/activation",
}

/// The text of a template.
pub(crate) fn source(name: &str) -> Option<&'static str> {
    TEMPLATES.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}
