//! Writes the book's page about AMD cards.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use super::{CardReport, KernelStats, RadvCard, TUNED, template};

/// Row of the tables: a template, or all that are not listed.
struct Row<'a> {
    name: String,
    /// Kernels by card.
    kernels: Vec<Vec<&'a KernelStats>>,
}

/// Renders the page from reports of all kernels.
pub(super) fn render(reports: &[(RadvCard, CardReport)]) -> String {
    let driver = reports.first().map_or("", |(_, report)| &report.driver);
    let today = date(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
    let cards: Vec<_> = reports
        .iter()
        .map(|(card, report)| {
            let (name, product) = (card.generation, card.product);
            format!("{name} ({product}, `{}`, {} kernels)", card.family, report.kernels.len())
        })
        .collect();
    let mut page = format!(
        "# AMD cards\n\n\
         `cargo xtask kernels --radv --page docs/src/reference/amd.md` writes this page. RADV, Mesa's driver of AMD\n\
         cards, compiles every kernel for cards that are not present. The command fails if a kernel does not compile,\n\
         if a kernel spills vector registers, or if a tuned kernel spills registers at all. No kernel ran on a card.\n\n\
         | | |\n| --- | --- |\n| driver | {driver} |\n| date | {today} |\n"
    );
    for card in cards {
        let _ = writeln!(page, "| compiled for | {card} |");
    }
    let rows = rows(reports);
    let _ = write!(
        page,
        "\n## Registers and memory\n\n\
         The worst kernel of each template: vector registers of an invocation by generation, and bytes of workgroup\n\
         memory (LDS). Scalar registers are those of {}; later generations always allot 128.\n\n",
        generation(reports)
    );
    table(&mut page, reports, &["SGPRs", "LDS"], &rows, |row| {
        let mut cells: Vec<u64> = row.kernels.iter().map(|kernels| worst(kernels, |s| s.vgprs)).collect();
        cells.push(row.kernels.first().map_or(0, |kernels| worst(kernels, |s| s.sgprs)));
        cells.push(row.kernels.iter().map(|kernels| worst(kernels, |s| s.lds)).max().unwrap_or_default());
        cells
    });
    page.push_str(
        "\n## Occupancy\n\n\
         The fewest waves of a kernel that a SIMD unit holds at once, and the most that any kernel reaches. RADV counts\n\
         waves of 64 invocations on GFX9, and of 32 from GFX10 on.\n\n",
    );
    let mut occupancy = rows;
    let all = reports.iter().map(|(_, report)| report.kernels.iter().map(|(_, stats)| stats).collect());
    let most: Vec<u64> = reports
        .iter()
        .map(|(_, report)| report.kernels.iter().map(|(_, stats)| stats.waves).max().unwrap_or_default())
        .collect();
    occupancy.push(Row { name: "maximum".to_owned(), kernels: all.collect() });
    table(&mut page, reports, &[], &occupancy, |row| match row.name.as_str() {
        "maximum" => most.clone(),
        _ => row
            .kernels
            .iter()
            .map(|kernels| kernels.iter().map(|stats| stats.waves).min().unwrap_or_default())
            .collect(),
    });
    spills(&mut page, reports);
    page
}

/// Groups kernels by template; templates that are not tuned share a row, except elementwise operations.
fn rows(reports: &[(RadvCard, CardReport)]) -> Vec<Row<'_>> {
    let mut groups: BTreeMap<(bool, &str), Vec<Vec<&KernelStats>>> = BTreeMap::new();
    for (index, (_, report)) in reports.iter().enumerate() {
        for (label, stats) in &report.kernels {
            let name = template(label);
            let is_listed = name == "pointwise" || TUNED.contains(&name);
            let key = if is_listed { (false, name) } else { (true, "all others") };
            let kernels = groups.entry(key).or_insert_with(|| vec![Vec::new(); reports.len()]);
            kernels[index].push(stats);
        }
    }
    let name = |is_rest: bool, name: &str| if is_rest { name.to_owned() } else { format!("`{name}`") };
    groups
        .into_iter()
        .map(|((is_rest, label), kernels)| Row { name: name(is_rest, label), kernels })
        .collect()
}

/// Writes a table with a column for each generation, and further `columns`.
fn table(
    page: &mut String,
    reports: &[(RadvCard, CardReport)],
    columns: &[&str],
    rows: &[Row<'_>],
    cells: impl Fn(&Row<'_>) -> Vec<u64>,
) {
    let names = reports.iter().map(|(card, _)| card.generation).chain(columns.iter().copied());
    let names: Vec<_> = names.collect();
    let _ = writeln!(page, "| template | kernels | {} |", names.join(" | "));
    let _ = writeln!(page, "| --- | --: |{}", " --: |".repeat(names.len()));
    for row in rows {
        let count = row.kernels.iter().map(Vec::len).max().unwrap_or_default();
        let cells: Vec<_> = cells(row).iter().map(u64::to_string).collect();
        let _ = writeln!(page, "| {} | {count} | {} |", row.name, cells.join(" | "));
    }
}

/// Writes the kernels that spill registers, and the number of the others.
fn spills(page: &mut String, reports: &[(RadvCard, CardReport)]) {
    let mut found: BTreeMap<(&str, u64, u64), Vec<&str>> = BTreeMap::new();
    let mut others = 0;
    for (card, report) in reports {
        for (label, stats) in &report.kernels {
            match stats.spills() {
                true => {
                    let cards = found.entry((label, stats.spilled_vgprs, stats.spilled_sgprs)).or_default();
                    if !cards.contains(&card.generation) {
                        cards.push(card.generation);
                    }
                }
                false => others += 1,
            }
        }
    }
    page.push_str(
        "\n## Spilled registers\n\n\
         Vector registers are spilled to memory. Scalar registers are spilled to lanes of vector registers.\n\n\
         | kernel | generations | VGPRs | SGPRs |\n| --- | --- | --: | --: |\n",
    );
    for ((label, vgprs, sgprs), cards) in found {
        let _ = writeln!(page, "| `{label}` | {} | {vgprs} | {sgprs} |", cards.join(", "));
    }
    let _ = writeln!(page, "| {others} others | all | 0 | 0 |");
}

fn generation(reports: &[(RadvCard, CardReport)]) -> &'static str {
    reports.first().map_or("no card", |(card, _)| card.generation)
}

fn worst(kernels: &[&KernelStats], of: fn(&KernelStats) -> u64) -> u64 {
    kernels.iter().map(|stats| of(stats)).max().unwrap_or_default()
}

/// Returns the date of a time in seconds since 1970, as year, month and day.
fn date(seconds: u64) -> String {
    let mut days = seconds / 86_400;
    let mut year = 1970;
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::super::CARDS;
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let seconds = [0, 951_782_399, 951_782_400, 1_735_689_599, 1_735_689_600];
        let expected = ["1970-01-01", "2000-02-28", "2000-02-29", "2024-12-31", "2025-01-01"];
        assert_eq!(seconds.map(date), expected);
    }

    #[test]
    fn tables_have_the_worst_kernel_of_each_template() {
        let stats = |vgprs, lds, waves| KernelStats { vgprs, lds, waves, ..KernelStats::default() };
        let spilling = KernelStats { spilled_sgprs: 4, ..stats(44, 0, 5) };
        let kernels = [
            ("matmul a", stats(20, 0, 10)),
            ("matmul b", stats(52, 64, 4)),
            ("svd", stats(8, 0, 10)),
            ("pointwise f64", spilling),
        ];
        let kernels: Vec<_> = kernels.map(|(label, stats)| (label.to_owned(), stats)).into();
        let report = CardReport { kernels, ..CardReport::default() };
        let page = render(&[(CARDS[0], report.clone()), (CARDS[1], report)]);
        for line in [
            "| `matmul` | 2 | 52 | 52 | 0 | 64 |",
            "| all others | 1 | 8 | 8 | 0 | 0 |",
            "| `matmul` | 2 | 4 | 4 |",
            "| maximum | 4 | 10 | 10 |",
            "| `pointwise f64` | GFX9, GFX10 | 0 | 4 |",
            "| 6 others | all | 0 | 0 |",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is missing in\n{page}");
        }
    }
}
