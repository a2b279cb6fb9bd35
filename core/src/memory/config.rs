//! The pool's settings, with PyTorch's syntax and meanings.

use std::fmt;

use super::validation::MAX_MEMORY_BYTES;
use crate::environment;
use crate::memory::error::{Error, Result};

const MIB: u64 = 1 << 20;

/// Environment variables that [`Config::from_env`] reads; the first one that is set counts.
pub const ENV_VARS: [&str; 3] = ["FOREBAY_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// Steps between two powers of two, for requests from each of sixteen powers of two (1 MiB to 32 GiB and
/// more).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundupDivisions([u16; 16]);

impl RoundupDivisions {
    /// Uses the same number of steps for every size; 0 or 1 disables rounding.
    #[must_use]
    pub fn uniform(divisions: u16) -> Self {
        Self([divisions; 16])
    }

    /// Returns the number of steps for requests of `bytes`.
    #[must_use]
    #[inline]
    pub fn steps_for(&self, bytes: u64) -> u64 {
        let power = bytes.max(MIB).ilog2() - MIB.ilog2();
        u64::from(self.0[(power as usize).min(15)])
    }
}

/// Choice of the free block for a large request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FitPolicy {
    /// The smallest sufficient block; among equal ones, the lowest address. PyTorch's policy.
    Best,
    /// Best fit, if that block is at most an eighth larger than the request. Otherwise the choice keeps large
    /// memory whole. In virtual segments it is the lowest address, so that high memory becomes free and can
    /// move elsewhere. In plain segments it is a split segment rather than a large idle one.
    #[default]
    LowestAddress,
}

/// Settings of a pool.
///
/// The defaults are PyTorch's, except where recorded workloads do better otherwise. Segments grow through
/// virtual memory where the driver supports it. Idle memory is released before the pool grows past what the
/// program has shown to need. Fewer sizes count as small. [`Config::pytorch`] returns PyTorch's own defaults.
///
/// As text: `key:value,key:value`, e.g. `max_split_size_mb:256,roundup_power2_divisions:[256:1,512:2,>:4]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// `max_split_size_mb`: blocks of at least this many bytes are never split; `None` splits all.
    pub max_split_size: Option<u64>,
    /// `max_non_split_rounding_mb`: largest excess of a block over a request of at least `max_split_size`.
    pub max_non_split_rounding: u64,
    /// `roundup_power2_divisions`: number of steps between powers of two that sizes are rounded up to.
    pub roundup_power2_divisions: RoundupDivisions,
    /// `garbage_collection_threshold`: part of the limit above which segments idle for long are released
    /// before the pool grows; 0 disables it.
    pub garbage_collection_threshold: f64,
    /// `per_process_memory_fraction`: part of the device's memory that the pool may take.
    pub per_process_memory_fraction: f64,
    /// `small_size_kb`: requests of up to this many bytes are kept apart from larger ones (PyTorch: 1 MiB).
    pub small_size: u64,
    /// `fit`: `best` or `low`.
    pub fit: FitPolicy,
    /// `large_segment_size_mb`: size of the segment, or of the mapping, for requests below 10 MiB that are
    /// not small (PyTorch: 20 MiB).
    pub large_segment_size: u64,
    /// `expandable_segments`: grow through virtual memory where the source supports it.
    pub expandable_segments: bool,
    /// `max_memory_mb`: limit on the pool's memory.
    pub max_memory: Option<u64>,
    /// `max_process_memory_mb`: limit on the memory of all pools of the process, checked when this pool grows
    /// (see also [`set_process_limit`](super::set_process_limit)).
    pub max_process_memory: Option<u64>,
    /// `throw_on_cudamalloc_oom`: fail as soon as the device is full, without releasing memory and retrying.
    pub fail_fast: bool,
    /// `release_before_growth`: release idle memory before holding more than `1 + growth_slack` times the
    /// peak usage.
    pub release_before_growth: bool,
    /// `growth_slack`: slack of `release_before_growth`.
    pub growth_slack: f64,
    /// `compaction`: move tensors' blocks in use where free memory is fragmented.
    pub compaction: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            small_size: MIB / 4,
            fit: FitPolicy::LowestAddress,
            large_segment_size: 32 * MIB,
            expandable_segments: true,
            release_before_growth: true,
            growth_slack: 0.01,
            compaction: true,
            ..Self::pytorch()
        }
    }
}

impl Config {
    /// Returns PyTorch's rules and defaults.
    #[must_use]
    pub fn pytorch() -> Self {
        Self {
            max_split_size: None,
            max_non_split_rounding: 20 * MIB,
            roundup_power2_divisions: RoundupDivisions::default(),
            garbage_collection_threshold: 0.0,
            per_process_memory_fraction: 1.0,
            small_size: MIB,
            fit: FitPolicy::Best,
            large_segment_size: 20 * MIB,
            expandable_segments: false,
            max_memory: None,
            max_process_memory: None,
            fail_fast: false,
            release_before_growth: false,
            growth_slack: 0.0,
            compaction: false,
        }
    }

    /// Returns the limit of a pool on a device of `total` bytes, if there is one.
    pub(crate) fn pool_limit(&self, total: Option<u64>) -> Option<u64> {
        let fraction = self.per_process_memory_fraction;
        let part = total.filter(|_| fraction < 1.0).map(|total| (total as f64 * fraction) as u64);
        self.max_memory.into_iter().chain(part).min()
    }

    /// Returns the defaults, changed by the first of [`ENV_VARS`] that is set.
    ///
    /// # Errors
    /// The variable is invalid.
    pub fn from_env() -> Result<Self> {
        // A value that is not Unicode is an error, rather than treated as unset.
        ENV_VARS.into_iter().try_for_each(|name| environment::read_text(name).map(drop))?;
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// Runs [`from_env`](Self::from_env) with `get` as the source of variables.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        for name in ENV_VARS {
            if let Some(text) = get(name) {
                return Self::default()
                    .with_settings(&text)
                    .map_err(|e| Error::InvalidConfig(format!("{name}: {e}")));
            }
        }
        Ok(Self::default())
    }

    /// Returns the configuration of one device: that of [`from_env`](Self::from_env), changed by the device's
    /// own variable, such as `FOREBAY_ALLOC_CONF_CUDA_0`. Keys missing there keep their value for all
    /// devices.
    ///
    /// # Errors
    /// One of the project's variables is invalid: see [`variables::check`](crate::variables::check).
    pub fn for_device(backend: &str, index: usize) -> Result<Self> {
        Self::for_device_lookup(|name| std::env::var(name).ok(), backend, index)
    }

    fn for_device_lookup(get: impl Fn(&str) -> Option<String>, backend: &str, index: usize) -> Result<Self> {
        let config = Self::from_lookup(&get)?;
        let name = format!("{}_{}_{index}", ENV_VARS[0], backend.to_uppercase());
        get(&name).map_or(Ok(config), |text| {
            config.with_settings(&text).map_err(|e| Error::InvalidConfig(format!("{name}: {e}")))
        })
    }

    /// Returns the defaults, changed by `text`.
    pub fn parse(text: &str) -> Result<Self> {
        Self::default().with_settings(text)
    }

    /// Returns this configuration, changed by `text`.
    pub fn with_settings(mut self, text: &str) -> Result<Self> {
        let pairs = parse_pairs(text)?;
        for (k, (key, value)) in pairs.iter().enumerate() {
            if pairs[..k].iter().any(|(earlier, _)| earlier == key) {
                return Err(Error::InvalidConfig(format!(
                    "`{key}` is set twice; keep one of the two values"
                )));
            }
            let invalid =
                |expected: &str| Error::InvalidConfig(format!("`{key}:{value}`: expected {expected}"));
            let mut settings = self.settings();
            match settings.iter_mut().find(|(name, _)| name == key) {
                Some((_, field)) => field.parse(value).map_err(|expected| invalid(&expected))?,
                None if key == "backend" && value == "native" => {}
                None if key == "backend" => return Err(invalid("`native` (this pool; there is no other)")),
                None if IGNORED_PYTORCH_KEYS.contains(&key.as_str()) => {
                    log::warn!("allocator setting `{key}` has no meaning here and is ignored");
                }
                None => {
                    let mut keys: Vec<&str> = settings.iter().map(|s| s.0).chain(["backend"]).collect();
                    keys.sort_unstable();
                    return Err(Error::InvalidConfig(format!(
                        "unrecognized key `{key}`; valid keys are {}",
                        keys.join(", ")
                    )));
                }
            }
        }
        // Strings that set PyTorch's `max_split_size_mb` imply PyTorch's smaller segments.
        if self.max_split_size.is_some() && !text.contains("large_segment_size_mb") {
            self.large_segment_size = self.large_segment_size.min(Self::pytorch().large_segment_size);
        }
        match self.max_split_size {
            Some(limit) if limit <= self.large_segment_size => Err(Error::InvalidConfig(format!(
                "max_split_size_mb:{} must be larger than large_segment_size_mb:{}, or no large block could be split",
                limit / MIB,
                self.large_segment_size / MIB
            ))),
            _ => Ok(self),
        }
    }

    /// Returns all settings with their keys, in the order of their text.
    fn settings(&mut self) -> [(&'static str, Field<'_>); 15] {
        use Field::{Bool, Bytes, Divisions, Fit, Limit, Number};
        [
            ("expandable_segments", Bool(&mut self.expandable_segments)),
            ("fit", Fit(&mut self.fit)),
            ("small_size_kb", Bytes(&mut self.small_size, MIB >> 10)),
            ("large_segment_size_mb", Bytes(&mut self.large_segment_size, MIB)),
            ("max_split_size_mb", Limit(&mut self.max_split_size)),
            ("max_non_split_rounding_mb", Bytes(&mut self.max_non_split_rounding, MIB)),
            ("roundup_power2_divisions", Divisions(&mut self.roundup_power2_divisions)),
            ("garbage_collection_threshold", Number(&mut self.garbage_collection_threshold, 1.0)),
            ("per_process_memory_fraction", Number(&mut self.per_process_memory_fraction, 1.0)),
            ("max_memory_mb", Limit(&mut self.max_memory)),
            ("max_process_memory_mb", Limit(&mut self.max_process_memory)),
            ("throw_on_cudamalloc_oom", Bool(&mut self.fail_fast)),
            ("release_before_growth", Bool(&mut self.release_before_growth)),
            ("growth_slack", Number(&mut self.growth_slack, 100.0)),
            ("compaction", Bool(&mut self.compaction)),
        ]
    }

    /// Rounds the size of a request, in multiples of `unit`, a power of two (PyTorch: 512).
    #[must_use]
    #[inline]
    pub fn round_size(&self, bytes: u64, unit: u64) -> u64 {
        if bytes <= unit {
            return unit;
        }
        let divisions = self.roundup_power2_divisions.steps_for(bytes);
        if divisions > 1 && bytes > unit.saturating_mul(divisions) {
            let step = (1 << bytes.ilog2()) / divisions;
            if step > unit {
                let rounded = bytes.checked_next_multiple_of(step).unwrap_or(bytes);
                return rounded.saturating_add(unit - 1) & !(unit - 1);
            }
        }
        // Avoids a division, since this runs for every request.
        bytes.saturating_add(unit - 1) & !(unit - 1)
    }
}

impl fmt::Display for Config {
    /// Writes all settings that [`Config::parse`] reads, in whole MiB (KiB for `small_size_kb`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut config = *self;
        let texts = config.settings().into_iter();
        let texts = texts.filter_map(|(key, field)| Some(format!("{key}:{}", field.to_text()?)));
        f.write_str(&texts.collect::<Vec<_>>().join(","))
    }
}

/// PyTorch's keys without a meaning for this pool. They are ignored, so that PyTorch's strings remain valid.
const IGNORED_PYTORCH_KEYS: [&str; 11] = [
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
];

/// Field of a setting.
enum Field<'a> {
    Bool(&'a mut bool),
    /// Bytes in whole units.
    Bytes(&'a mut u64, u64),
    /// Limit in MiB, a whole number, or none.
    Limit(&'a mut Option<u64>),
    /// Number from 0 to a maximum.
    Number(&'a mut f64, f64),
    Fit(&'a mut FitPolicy),
    Divisions(&'a mut RoundupDivisions),
}

impl Field<'_> {
    /// Sets the field from its text. The error says what was expected.
    fn parse(&mut self, text: &str) -> Result<(), String> {
        match self {
            Self::Bool(field) => match text {
                "True" => **field = true,
                "False" => **field = false,
                _ => return Err("True or False".to_owned()),
            },
            Self::Bytes(field, unit) => **field = parse_bytes(text, *unit)?,
            Self::Limit(field) => **field = Some(parse_bytes(text, MIB)?),
            Self::Number(field, max) => {
                let number = text.parse().ok().filter(|n| (0.0..=*max).contains(n));
                **field = number.ok_or_else(|| format!("a number from 0 to {max}"))?;
            }
            Self::Fit(field) => match text {
                "best" => **field = FitPolicy::Best,
                "low" => **field = FitPolicy::LowestAddress,
                _ => return Err("best or low".to_owned()),
            },
            Self::Divisions(field) => **field = RoundupDivisions::parse(text)?,
        }
        Ok(())
    }

    /// Returns the text of the field; `None` for no limit and no rounding.
    fn to_text(&self) -> Option<String> {
        Some(match self {
            Self::Bool(field) => if **field { "True" } else { "False" }.to_owned(),
            Self::Bytes(field, unit) => (**field / unit).to_string(),
            Self::Limit(field) => (field.as_ref()? / MIB).to_string(),
            Self::Number(field, _) => field.to_string(),
            Self::Fit(field) => if **field == FitPolicy::Best { "best" } else { "low" }.to_owned(),
            Self::Divisions(field) if **field == RoundupDivisions::default() => return None,
            Self::Divisions(field) => {
                let list = field.0.iter().enumerate().map(|(at, n)| format!("{}:{n}", 1u64 << at));
                format!("[{}]", list.collect::<Vec<_>>().join(","))
            }
        })
    }
}

fn parse_bytes(text: &str, unit: u64) -> Result<u64, String> {
    let max = MAX_MEMORY_BYTES / unit;
    let number = text.parse::<u64>().ok().filter(|n| (1..=max).contains(n));
    number.map(|n| n * unit).ok_or_else(|| format!("a whole number from 1 to {max}"))
}

impl RoundupDivisions {
    fn parse(text: &str) -> Result<Self, String> {
        let expected =
            || "a power of two, or a list such as [256:1,512:2,1024:4,>:8] (sizes in MiB)".to_owned();
        let steps = |text: &str| {
            let number = text.trim().parse::<u16>().ok().filter(|n| *n == 0 || n.is_power_of_two());
            number.ok_or_else(expected)
        };
        let Some(list) = text.strip_prefix('[').and_then(|v| v.strip_suffix(']')) else {
            return Ok(Self::uniform(steps(text)?));
        };
        let mut divisions = Self::default();
        let mut next = 0;
        for item in list.split(',') {
            let (size, count) = item.split_once(':').ok_or_else(expected)?;
            let count = steps(count)?;
            // A size names the interval that starts at it; sizes between two listed ones get the later one's
            // steps.
            let end = if size.trim() == ">" {
                16
            } else {
                let size = size.trim().parse::<u64>().ok().filter(|n| n.is_power_of_two());
                size.ok_or_else(expected)?.ilog2() as usize + 1
            };
            if end <= next || end > 16 {
                return Err("sizes that rise, below 64 GiB".to_owned());
            }
            divisions.0[next..end].fill(count);
            // Sizes beyond the list keep the last one's steps.
            divisions.0[end..].fill(count);
            next = end;
        }
        Ok(divisions)
    }
}

/// Parses `key:value,key:[a,b]` into pairs.
fn parse_pairs(text: &str) -> Result<Vec<(String, String)>> {
    let mut pairs = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (key, after) = rest.split_once(':').ok_or_else(|| {
            Error::InvalidConfig(format!("`{rest}`: expected `key:value`, separated by commas"))
        })?;
        let after = after.trim_start();
        let end = if after.starts_with('[') {
            after
                .find(']')
                .map(|at| at + 1)
                .ok_or_else(|| Error::InvalidConfig(format!("`{rest}`: `]` is missing")))?
        } else {
            after.find(',').unwrap_or(after.len())
        };
        let (value, tail) = after.split_at(end);
        pairs.push((key.trim().to_owned(), value.split_whitespace().collect()));
        rest = match tail.trim_start().strip_prefix(',') {
            Some(tail) => tail.trim_start(),
            None if tail.trim().is_empty() => "",
            None => return Err(Error::InvalidConfig(format!("`{tail}`: expected `,` between settings"))),
        };
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    #[test]
    fn every_key_parses() -> Result<()> {
        let config = Config::parse(
            "backend:native, max_split_size_mb:256,max_non_split_rounding_mb:10,garbage_collection_threshold:0.8,\
             per_process_memory_fraction:0.5,large_segment_size_mb:32,expandable_segments:False,max_memory_mb:1000,\
             max_process_memory_mb:2000,\
             throw_on_cudamalloc_oom:True,small_size_kb:512,fit:best,release_before_growth:False,growth_slack:0.25,\
             compaction:False,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],pinned_use_background_threads:True",
        )?;
        let mut divisions = [1; 16];
        divisions[9] = 2;
        divisions[10] = 4;
        divisions[11..].fill(8);
        let expected = Config {
            max_split_size: Some(256 * MIB),
            max_non_split_rounding: 10 * MIB,
            roundup_power2_divisions: RoundupDivisions(divisions),
            garbage_collection_threshold: 0.8,
            per_process_memory_fraction: 0.5,
            small_size: 512 * KIB,
            fit: FitPolicy::Best,
            large_segment_size: 32 * MIB,
            expandable_segments: false,
            max_memory: Some(1000 * MIB),
            max_process_memory: Some(2000 * MIB),
            fail_fast: true,
            release_before_growth: false,
            growth_slack: 0.25,
            compaction: false,
        };
        assert_eq!(config, expected);
        assert_eq!(Config::parse(&config.to_string())?, config);
        assert_eq!(
            Config::parse("roundup_power2_divisions:4")?.roundup_power2_divisions,
            RoundupDivisions::uniform(4)
        );
        assert_eq!(Config::parse("  ")?, Config::default());
        assert_eq!(Config::parse("max_split_size_mb:21")?.max_split_size, Some(21 * MIB));
        Ok(())
    }

    #[test]
    fn each_variable_is_read_in_order() -> Result<()> {
        for (at, name) in ENV_VARS.iter().enumerate() {
            // The variables before this one are unset; those after it are set and must not count.
            let get = |variable: &str| {
                let found = ENV_VARS.iter().position(|v| *v == variable)?;
                (found >= at)
                    .then(|| if found == at { "max_memory_mb:7" } else { "max_memory_mb:8" }.to_owned())
            };
            let config = Config::from_lookup(get)?;
            assert_eq!(config.max_memory, Some(7 * MIB), "{name}");
            let bad = Config::from_lookup(|variable| (variable == *name).then(|| "nonsense:1".to_owned()));
            assert!(bad.is_err_and(|e| e.to_string().contains(name)), "{name}");
        }
        Ok(())
    }

    #[test]
    fn settings_can_be_specific_to_a_device() -> Result<()> {
        let get = |name: &str| match name {
            "FOREBAY_ALLOC_CONF" => Some("max_memory_mb:7,growth_slack:0.5".to_owned()),
            "FOREBAY_ALLOC_CONF_CUDA_1" => Some("max_memory_mb:9".to_owned()),
            "FOREBAY_ALLOC_CONF_WGPU_0" => Some("max_memory:9".to_owned()),
            _ => None,
        };
        let of = |backend, index| Config::for_device_lookup(get, backend, index);
        assert_eq!((of("cuda", 0)?.max_memory, of("cuda", 0)?.growth_slack), (Some(7 * MIB), 0.5));
        assert_eq!((of("cuda", 1)?.max_memory, of("cuda", 1)?.growth_slack), (Some(9 * MIB), 0.5));
        let wrong = of("wgpu", 0).map_or_else(|e| e.to_string(), |c| c.to_string());
        assert!(wrong.starts_with("FOREBAY_ALLOC_CONF_WGPU_0: unrecognized key `max_memory`"), "{wrong}");
        Ok(())
    }

    fn message(text: &str) -> String {
        Config::parse(text).map_or_else(|e| e.to_string(), |c| format!("accepted: {c:?}"))
    }

    #[test]
    fn invalid_settings_are_named() {
        insta::assert_snapshot!(message("max_split_mb:3"), @"unrecognized key `max_split_mb`; valid keys are backend, compaction, expandable_segments, fit, garbage_collection_threshold, growth_slack, large_segment_size_mb, max_memory_mb, max_non_split_rounding_mb, max_process_memory_mb, max_split_size_mb, per_process_memory_fraction, release_before_growth, roundup_power2_divisions, small_size_kb, throw_on_cudamalloc_oom");
        insta::assert_snapshot!(message("expandable_segments:true"), @"`expandable_segments:true`: expected True or False");
        insta::assert_snapshot!(message("max_split_size_mb:-1"), @"`max_split_size_mb:-1`: expected a whole number from 1 to 8589934592");
        insta::assert_snapshot!(message("max_split_size_mb:2"), @"max_split_size_mb:2 must be larger than large_segment_size_mb:20, or no large block could be split");
        insta::assert_snapshot!(message("fit:low,max_memory_mb:1,max_memory_mb:2"), @"`max_memory_mb` is set twice; keep one of the two values");
        insta::assert_snapshot!(message("per_process_memory_fraction:1.5"), @"`per_process_memory_fraction:1.5`: expected a number from 0 to 1");
        insta::assert_snapshot!(message("roundup_power2_divisions:[256:3]"), @"`roundup_power2_divisions:[256:3]`: expected a power of two, or a list such as [256:1,512:2,1024:4,>:8] (sizes in MiB)");
        insta::assert_snapshot!(message("roundup_power2_divisions:[512:2,256:1]"), @"`roundup_power2_divisions:[512:2,256:1]`: expected sizes that rise, below 64 GiB");
        insta::assert_snapshot!(message("roundup_power2_divisions:[512:2"), @"`roundup_power2_divisions:[512:2`: `]` is missing");
        insta::assert_snapshot!(message("expandable_segments"), @"`expandable_segments`: expected `key:value`, separated by commas");
        insta::assert_snapshot!(message("backend:cudaMallocAsync"), @"`backend:cudaMallocAsync`: expected `native` (this pool; there is no other)");
    }

    /// Every key, at the ends of its range and outside of it.
    #[test]
    fn each_range_is_checked() -> Result<()> {
        let sizes = [
            ("max_non_split_rounding_mb", MAX_MEMORY_BYTES / MIB),
            ("large_segment_size_mb", MAX_MEMORY_BYTES / MIB),
            ("max_memory_mb", MAX_MEMORY_BYTES / MIB),
            ("max_process_memory_mb", MAX_MEMORY_BYTES / MIB),
            ("small_size_kb", MAX_MEMORY_BYTES / KIB),
        ];
        for (key, max) in sizes {
            for good in [1, max] {
                let config = Config::parse(&format!("{key}:{good}"))?;
                assert_eq!(Config::parse(&config.to_string())?, config, "{key}:{good}");
            }
            for bad in [
                "0",
                "-1",
                "1.5",
                "",
                "x",
                "18446744073709551615",
                "18446744073709551616",
                &(max + 1).to_string(),
            ] {
                let message = message(&format!("{key}:{bad}"));
                assert!(
                    message.contains(&format!("`{key}:{bad}`: expected a whole number from 1 to {max}")),
                    "{message}"
                );
            }
        }
        let fractions = [
            ("garbage_collection_threshold", 1.0),
            ("per_process_memory_fraction", 1.0),
            ("growth_slack", 100.0),
        ];
        for (key, max) in fractions {
            for good in [0.0, max] {
                Config::parse(&format!("{key}:{good}"))?;
            }
            for bad in ["-0.1", "NaN", "inf", "", "101"] {
                let message = message(&format!("{key}:{bad}"));
                assert!(
                    message.contains(&format!("`{key}:{bad}`: expected a number from 0 to {max}")),
                    "{message}"
                );
            }
        }
        for bad in [
            "roundup_power2_divisions:65536",
            "roundup_power2_divisions:[65536:2]",
            "fit:worst",
            "compaction:1",
        ] {
            assert!(message(bad).contains("expected"), "{bad}");
        }
        Ok(())
    }

    #[test]
    fn rounding_matches_pytorch() -> Result<()> {
        let plain = Config::default();
        for (bytes, rounded) in [(0, 512), (1, 512), (512, 512), (513, 1024), (1200, 1536)] {
            assert_eq!(plain.round_size(bytes, 512), rounded, "{bytes}");
        }
        // With 4 divisions between powers of two; never below a multiple of 512.
        let divided = Config::parse("roundup_power2_divisions:4")?;
        for (bytes, rounded) in [
            (1200, 1536),
            (5 * KIB, 5 * KIB),
            (5 * KIB + 1, 6 * KIB),
            (MIB + 1, MIB + 256 * KIB),
            (7 * MIB + 1, 8 * MIB),
        ] {
            assert_eq!(divided.round_size(bytes, 512), rounded, "{bytes}");
        }
        for config in [plain, divided] {
            for bytes in [u64::MAX, u64::MAX - 511, u64::MAX - (1 << 40), 1 << 63] {
                assert!(config.round_size(bytes, 512) >= bytes / 512 * 512, "{bytes}");
            }
        }
        Ok(())
    }
}
