//! Plan of a captured step: the commands that are needed, and the placement of buffers used only inside the
//! step.

use crate::backend::command::Access;

#[derive(Clone, Copy, Debug)]
pub(crate) struct CapturedBuffer {
    pub(crate) bytes: u64,
    /// If true, the buffer outlives the step and is not placed.
    pub(crate) outlives_step: bool,
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct CapturePlan {
    /// For each command: true if it runs.
    pub(crate) is_needed: Vec<bool>,
    /// Arena and offset of each buffer used only inside the step.
    pub(crate) placements: Vec<Option<(usize, u64)>>,
    /// Size of each arena in bytes.
    pub(crate) arena_sizes: Vec<u64>,
}

/// Range of commands from the first to the last use of a buffer, both included.
#[derive(Clone, Copy)]
struct Lifetime {
    first: usize,
    last: usize,
}

/// Plans the commands and places buffers in arenas of at most `max_arena_bytes` bytes, at multiples of `alignment`.
/// `overwritten` has, for each command, a buffer of which the command writes every element and reads none.
pub(crate) fn plan_capture<'a, C>(
    commands: C,
    overwritten: &[Option<u32>],
    pieces: &[CapturedBuffer],
    alignment: u64,
    max_arena_bytes: u64,
) -> CapturePlan
where
    C: DoubleEndedIterator<Item = &'a [(u32, Access)]> + ExactSizeIterator + Clone,
{
    let runs = find_needed_commands(commands.clone(), overwritten, pieces);
    let mut lives: Vec<Option<Lifetime>> = vec![None; pieces.len()];
    for (at, touched) in commands.enumerate().filter(|(at, _)| runs[*at]) {
        for &(piece, _) in touched {
            lives[piece as usize].get_or_insert(Lifetime { first: at, last: at }).last = at;
        }
    }
    // Largest first, so that small buffers fill the gaps; ties go to the earlier buffer.
    let mut order: Vec<usize> =
        (0..pieces.len()).filter(|&at| !pieces[at].outlives_step && lives[at].is_some()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(pieces[at].bytes), lives[at].map_or(0, |life| life.first)));
    let mut plan =
        CapturePlan { is_needed: runs, placements: vec![None; pieces.len()], arena_sizes: Vec::new() };
    let mut placed: Vec<Vec<(Lifetime, u64, u64)>> = Vec::new();
    for at in order {
        let Some(life) = lives[at] else { continue };
        let bytes = pieces[at].bytes.next_multiple_of(alignment);
        let found = placed.iter().enumerate().find_map(|(arena, there)| {
            let offset = find_smallest_gap(there, life, bytes);
            (offset + bytes <= max_arena_bytes).then_some((arena, offset))
        });
        let (arena, offset) = found.unwrap_or_else(|| {
            placed.push(Vec::new());
            plan.arena_sizes.push(0);
            (placed.len() - 1, 0)
        });
        let by_offset = placed[arena].partition_point(|(_, start, _)| *start < offset);
        placed[arena].insert(by_offset, (life, offset, offset + bytes));
        plan.arena_sizes[arena] = plan.arena_sizes[arena].max(offset + bytes);
        plan.placements[at] = Some((arena, offset));
    }
    plan
}

/// Finds the commands that write a buffer which outlives the step, or a buffer that such a command uses
/// later.
fn find_needed_commands<'a, C>(
    commands: C,
    overwritten: &[Option<u32>],
    pieces: &[CapturedBuffer],
) -> Vec<bool>
where
    C: DoubleEndedIterator<Item = &'a [(u32, Access)]> + ExactSizeIterator,
{
    let mut needed: Vec<bool> = pieces.iter().map(|piece| piece.outlives_step).collect();
    let mut runs = vec![false; commands.len()];
    for (at, touched) in commands.enumerate().rev() {
        runs[at] = touched.iter().any(|(piece, touch)| *touch == Access::Write && needed[*piece as usize]);
        if runs[at] {
            // The command may write only a part of a buffer, or accumulate, so earlier writes of its operands
            // are needed too.
            touched.iter().for_each(|(piece, _)| needed[*piece as usize] = true);
            if let Some(piece) = overwritten.get(at).copied().flatten() {
                needed[piece as usize] = false;
            }
        }
    }
    runs
}

/// Returns the start of the smallest gap of at least `bytes` between buffers with overlapping lifetimes, or
/// the end of the last one.
fn find_smallest_gap(there: &[(Lifetime, u64, u64)], life: Lifetime, bytes: u64) -> u64 {
    let mut best: Option<(u64, u64)> = None;
    let mut end = 0;
    for &(other, start, other_end) in there {
        if other.last < life.first || life.last < other.first {
            continue;
        }
        if let Some(room) = start.checked_sub(end).filter(|room| *room >= bytes)
            && best.is_none_or(|(least, _)| room < least)
        {
            best = Some((room, end));
        }
        end = end.max(other_end);
    }
    best.map_or(end, |(_, start)| start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Read, Write};

    fn own(bytes: u64) -> CapturedBuffer {
        CapturedBuffer { bytes, outlives_step: false }
    }

    const STAYS: CapturedBuffer = CapturedBuffer { bytes: 1000, outlives_step: true };

    #[test]
    fn unneeded_commands_do_not_run_and_take_no_memory() {
        let pieces = [STAYS, own(100), own(200), own(300)];
        // 1 = f(0); 2 = f(1), unused; 3 = f(2), unused; 0 += 1.
        let commands: [&[(u32, Access)]; 4] = [
            &[(0, Read), (1, Write)],
            &[(1, Read), (2, Write)],
            &[(2, Read), (3, Write)],
            &[(1, Read), (0, Write)],
        ];
        let plan = plan_capture(commands.into_iter(), &[], &pieces, 64, 1 << 20);
        assert_eq!(plan.is_needed, [true, false, false, true]);
        assert_eq!(plan.placements, [None, Some((0, 0)), None, None]);
        assert_eq!(plan.arena_sizes, [128]);
    }

    #[test]
    fn a_write_that_is_overwritten_is_not_needed_unless_something_reads_it() {
        let pieces = [STAYS, own(100), own(100)];
        // 1 = f(0); [2 = f(1);] 1 is overwritten; 0 += 1 [and 2].
        let plain: [&[(u32, Access)]; 3] =
            [&[(0, Read), (1, Write)], &[(0, Read), (1, Write)], &[(1, Read), (0, Write)]];
        let plan = plan_capture(plain.into_iter(), &[None, Some(1), None], &pieces, 64, 1 << 20);
        assert_eq!(plan.is_needed, [false, true, true]);
        let read: [&[(u32, Access)]; 4] = [
            &[(0, Read), (1, Write)],
            &[(1, Read), (2, Write)],
            &[(0, Read), (1, Write)],
            &[(1, Read), (2, Read), (0, Write)],
        ];
        let plan = plan_capture(read.into_iter(), &[None, None, Some(1), None], &pieces, 64, 1 << 20);
        assert_eq!(plan.is_needed, [true; 4]);
    }

    #[test]
    fn buffers_with_disjoint_lifetimes_share_memory() {
        let pieces = [STAYS, own(256), own(256), own(256), own(64)];
        // A chain with two live buffers at any time; buffer 4 is always live.
        let commands: [&[(u32, Access)]; 4] = [
            &[(0, Read), (1, Write), (4, Write)],
            &[(1, Read), (2, Write)],
            &[(2, Read), (3, Write)],
            &[(3, Read), (4, Read), (0, Write)],
        ];
        let one = plan_capture(commands.into_iter(), &[], &pieces, 64, 1 << 20);
        assert_eq!(one.arena_sizes, [256 * 2 + 64]);
        assert_eq!(one.placements[1], one.placements[3]);
        let two = plan_capture(commands.into_iter(), &[], &pieces, 64, 512);
        assert_eq!(two.arena_sizes, [512, 64], "an arena that is full is followed by another");
    }

    #[test]
    fn buffers_with_overlapping_lifetimes_do_not_overlap() {
        // A synthetic step with many buffer sizes.
        let mut state = 12345_u32;
        let mut next = |n: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % n
        };
        let mut pieces = vec![STAYS];
        pieces.extend((0..200).map(|_| own(u64::from(1 + next(5000)))));
        let commands: Vec<Vec<(u32, Access)>> = (1..=200)
            .map(|k: u32| vec![(k.saturating_sub(1 + next(9)), Read), (k, Write), (0, Write)])
            .collect();
        let plan = plan_capture(commands.iter().map(Vec::as_slice), &[], &pieces, 256, 1 << 30);
        let life = |piece: u32| {
            let touches = |c: &Vec<(u32, Access)>| c.iter().any(|(p, _)| *p == piece);
            (commands.iter().position(touches), commands.iter().rposition(touches))
        };
        for a in 1..=200_u32 {
            for b in 1..a {
                let [(fa, la), (fb, lb)] = [life(a), life(b)];
                let range =
                    |p: u32| plan.placements[p as usize].map(|(_, o)| (o, o + pieces[p as usize].bytes));
                let (Some((sa, ea)), Some((sb, eb))) = (range(a), range(b)) else { panic!("{a} {b}") };
                assert!(la < fb || lb < fa || ea <= sb || eb <= sa, "{a} and {b} overlap");
            }
        }
    }
}
