//! Profiles of known cards: the properties that determine a step's memory and approximate time.

use super::null::{CardProfile, CardSpeed};
use super::{Features, LibraryFeatures, Limits, SourceLimits, VirtualMemory};
use crate::error::{Error, Result};
use crate::memory::Config;
use crate::variables;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// API through which a card is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CardApi {
    Cuda,
    Vulkan,
    Metal,
}

/// Card: short name, name, memory as reported by the driver (MiB), API, and the vendor's figures. The figures
/// are TFLOP/s in f32 and in 16-bit floats, and GB/s of memory and of the bus.
type CardRow = (&'static str, &'static str, u64, CardApi, [f64; 4]);

const CARD_TABLE: [CardRow; 22] = [
    ("t4", "Tesla T4", 14_914, CardApi::Cuda, [8.1, 65.0, 320.0, 12.0]),
    ("v100", "Tesla V100-SXM2-16GB", 16_144, CardApi::Cuda, [15.7, 125.0, 900.0, 12.0]),
    ("l4", "NVIDIA L4", 22_563, CardApi::Cuda, [30.3, 121.0, 300.0, 24.0]),
    ("a10", "NVIDIA A10", 22_503, CardApi::Cuda, [31.2, 125.0, 600.0, 24.0]),
    ("l40s", "NVIDIA L40S", 45_468, CardApi::Cuda, [91.6, 362.0, 864.0, 24.0]),
    ("a100-40", "NVIDIA A100-SXM4-40GB", 40_326, CardApi::Cuda, [19.5, 312.0, 1555.0, 24.0]),
    ("a100-80", "NVIDIA A100-SXM4-80GB", 81_037, CardApi::Cuda, [19.5, 312.0, 2039.0, 24.0]),
    ("h100", "NVIDIA H100 80GB HBM3", 81_079, CardApi::Cuda, [66.9, 989.0, 3350.0, 50.0]),
    ("h200", "NVIDIA H200", 143_167, CardApi::Cuda, [66.9, 989.0, 4800.0, 50.0]),
    ("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", 11_011, CardApi::Cuda, [13.4, 54.0, 616.0, 12.0]),
    ("rtx3060", "NVIDIA GeForce RTX 3060", 11_909, CardApi::Cuda, [12.7, 51.0, 360.0, 24.0]),
    ("rtx3080", "NVIDIA GeForce RTX 3080", 10_009, CardApi::Cuda, [29.8, 59.5, 760.0, 24.0]),
    ("rtx3090", "NVIDIA GeForce RTX 3090", 24_258, CardApi::Cuda, [35.6, 71.0, 936.0, 24.0]),
    ("rtx4060", "NVIDIA GeForce RTX 4060", 7_940, CardApi::Cuda, [15.1, 60.0, 272.0, 12.0]),
    ("rtx4070", "NVIDIA GeForce RTX 4070", 11_994, CardApi::Cuda, [29.1, 58.3, 504.0, 24.0]),
    ("rtx4080", "NVIDIA GeForce RTX 4080", 15_981, CardApi::Cuda, [48.7, 97.5, 717.0, 24.0]),
    ("rtx4090", "NVIDIA GeForce RTX 4090", 24_209, CardApi::Cuda, [82.6, 165.2, 1008.0, 24.0]),
    ("rtx5090", "NVIDIA GeForce RTX 5090", 32_110, CardApi::Cuda, [104.8, 209.5, 1792.0, 50.0]),
    ("rx7900xtx", "AMD Radeon RX 7900 XTX", 24_560, CardApi::Vulkan, [61.4, 61.4, 960.0, 24.0]),
    ("arc-a770", "Intel Arc A770", 16_288, CardApi::Vulkan, [19.7, 19.7, 560.0, 24.0]),
    ("m2-max", "Apple M2 Max (32 GB)", 21_845, CardApi::Metal, [13.6, 13.6, 400.0, 200.0]),
    ("m3-max", "Apple M3 Max (64 GB)", 49_152, CardApi::Metal, [14.2, 14.2, 400.0, 200.0]),
];

/// Short names of the cards whose libraries multiply 8-bit floats.
const F8_CARDS: [&str; 9] =
    ["l4", "l40s", "h100", "h200", "rtx4060", "rtx4070", "rtx4080", "rtx4090", "rtx5090"];

/// Short names of the cards before sm_80, whose tensor cores have no bf16.
const OLD_CARDS: [&str; 3] = ["t4", "v100", "rtx2080ti"];

const HOPPER_CARDS: [&str; 2] = ["h100", "h200"];

/// Short names that [`CardProfile::from_card`] accepts.
pub const CARDS: [&str; CARD_TABLE.len()] = {
    let mut names = [""; CARD_TABLE.len()];
    let mut k = 0;
    while k < CARD_TABLE.len() {
        names[k] = CARD_TABLE[k].0;
        k += 1;
    }
    names
};

impl CardProfile {
    /// Returns the profile of a card by its short name ([`CARDS`]): NVIDIA's cards through CUDA, the others
    /// through wgpu.
    ///
    /// The driver's own memory is an estimate, and speeds are the vendor's figures. The environment
    /// configures the pool, as for a real card ([`Config::from_env`]).
    ///
    /// # Errors
    /// No card has this name (the message lists the names), or an environment variable is invalid.
    pub fn from_card(name: &str) -> Result<Self> {
        variables::check()?;
        let plain = |name: &str| name.to_lowercase().replace(['-', '_', ' '], "");
        let found = CARD_TABLE.iter().find(|card| plain(card.0) == plain(name)).ok_or_else(|| {
            Error::argument(
                "card",
                format!("there is no card `{name}`; expected one of {}", CARDS.join(", ")),
            )
        })?;
        let &(short, name, mib, api, [flops, half_flops, bytes, host]) = found;
        let cuda = Self {
            name: name.to_owned(),
            total_bytes: mib * MIB,
            config: Config::from_env()?,
            // CUDA's context and modules, and cuBLASLt's workspace.
            overhead_bytes: 600 * MIB,
            library: LibraryFeatures {
                matmul: true,
                batched_matmul: !OLD_CARDS.contains(&short),
                f8_matmul: F8_CARDS.contains(&short),
                gelu_grad_epilogue: HOPPER_CARDS.contains(&short),
                convolution: HOPPER_CARDS.contains(&short),
                recurrent: HOPPER_CARDS.contains(&short),
                one_pass_attention: HOPPER_CARDS.contains(&short),
            },
            limits: Limits { max_binding_bytes: mib * MIB, ..Self::default().limits },
            speed: CardSpeed {
                flops: flops * 1e12,
                half_flops: half_flops * 1e12,
                memory_bandwidth: bytes * 1e9,
                launches_per_second: 250e3,
                host_bandwidth: host * 1e9,
            },
            ..Self::default()
        }
        .with_total_bytes(mib * MIB);
        Ok(match api {
            CardApi::Cuda => cuda,
            CardApi::Vulkan => cuda.with_wgpu_limits(),
            CardApi::Metal => {
                let mut metal = cuda.with_wgpu_limits();
                metal.features = Features { f64: false, i16: false, ..metal.features };
                metal.source_limits.max_segment = metal.total_bytes / 4 * 3;
                metal
            }
        })
    }

    /// Finds a card by the name that its driver reports.
    pub(crate) fn from_full_name(name: &str) -> Option<Self> {
        let card = CARD_TABLE.iter().find(|card| name == card.1)?;
        Self::from_card(card.0).ok()
    }

    /// Changes the profile to use through wgpu: plain segments, and the core's own matrix products.
    #[must_use]
    pub fn with_wgpu_limits(self) -> Self {
        // Largest binding that Vulkan drivers support.
        let binding = 4 * GIB - 4;
        Self {
            overhead_bytes: 300 * MIB,
            library: LibraryFeatures::default(),
            queues: 1,
            source_limits: SourceLimits {
                alignment: 256,
                max_segment: binding / 256 * 256,
                virtual_memory: None,
            },
            features: Features { f64_math: false, ..self.features },
            limits: Limits {
                max_binding_bytes: binding,
                max_workgroup_memory: 32 << 10,
                subgroup_size: (32, 64),
                ..self.limits
            },
            speed: CardSpeed { half_flops: self.speed.flops, launches_per_second: 150e3, ..self.speed },
            ..self
        }
    }

    /// Sets the total memory. A tensor larger than this is out of memory, not over a limit.
    #[must_use]
    pub fn with_total_bytes(self, total: u64) -> Self {
        let map = |v: VirtualMemory| VirtualMemory {
            reservation: (total + total / 8).next_multiple_of(v.granularity),
            ..v
        };
        let max_segment =
            if self.source_limits.virtual_memory.is_some() { total } else { self.source_limits.max_segment };
        Self {
            total_bytes: total,
            source_limits: SourceLimits {
                max_segment,
                virtual_memory: self.source_limits.virtual_memory.map(map),
                ..self.source_limits
            },
            ..self
        }
    }

    /// Sets the pool's configuration.
    #[must_use]
    pub fn with_config(self, config: Config) -> Self {
        Self { config, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_has_memory_and_an_unknown_one_is_an_error() -> Result<()> {
        for name in CARDS {
            let card = CardProfile::from_card(name)?;
            assert!(card.available_bytes() > 7 * GIB && card.available_bytes() < card.total_bytes, "{name}");
            assert_eq!(card.library.matmul, card.source_limits.virtual_memory.is_some(), "{name}");
        }
        assert_eq!(CardProfile::from_card("RTX 4090")?, CardProfile::from_card("rtx4090")?);
        let error = CardProfile::from_card("voodoo2").map_or_else(|e| e.to_string(), |_| String::new());
        assert!(error.contains("there is no card `voodoo2`; expected one of t4, "), "{error}");
        Ok(())
    }
}
