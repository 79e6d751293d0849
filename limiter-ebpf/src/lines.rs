//! The bucket table's lines in maps.

use core::{arch::asm, ptr};

use limiter_common::{
    Bucket, Env as _,
    abi::{ClassId, LineV4, LineV6, V4_SLOTS, V6_SLOTS},
    bucket::Cell as _,
    decide::WidePrefix,
    hash::BucketHash,
    packet::{Source, Space},
    table::{Claim, Line, Meta, Wanted},
    time::Tick,
};

use crate::{
    env::{MapEnv, Tat},
    maps::{
        BUCKETS_V4, BUCKETS_V6, BYTES, BYTES_V4, BYTES_V6, CEILINGS, LINES_CEILINGS, LINES_V4,
        LINES_V6,
    },
};

/// The bucket of `source` in `class`.
#[inline(always)]
pub(crate) fn find(source: Source, class: ClassId, hash: BucketHash) -> Option<BucketRef> {
    let wanted = Wanted::new(source, class);
    match source.space {
        Space::Ipv4 => {
            let lines = LINES_V4.load();
            find_in(&wanted, hash.first(lines), hash.second(lines), v4)
        }
        _ => {
            let lines = LINES_V6.load();
            find_in(&wanted, hash.first(lines), hash.second(lines), v6)
        }
    }
}

#[inline(always)]
fn find_in<L: MapLine>(
    wanted: &Wanted,
    first: u32,
    second: u32,
    line: impl Fn(u32) -> Option<L>,
) -> Option<BucketRef> {
    let first = line(first)?;
    if let Some((slot, meta)) = wanted.find(&first) {
        return Some(first.bucket(slot, meta));
    }
    let second = line(second)?;
    let (slot, meta) = wanted.find(&second)?;
    Some(second.bucket(slot, meta))
}

/// A slot for the bucket of `source` in `class`, in either line: a free one, or else that of an owner
/// who has proven nothing.
#[inline(always)]
pub(crate) fn make(
    source: Source,
    class: ClassId,
    hash: BucketHash,
    meta: Meta,
    now: Tick,
) -> Option<BucketRef> {
    let is_v4 = matches!(source.space, Space::Ipv4);
    let lines = if is_v4 { LINES_V4.load() } else { LINES_V6.load() };
    let (first, second) = (u64::from(hash.first(lines)), u64::from(hash.second(lines)));
    let taken = if is_v4 {
        claim_v4(source.bits, first << 32 | second, meta.0, now.0)
    } else {
        claim_v6(source.bits, first << 32 | second, meta.0, now.0)
    };
    if taken == NOT_TAKEN {
        return None;
    }
    let (index, slot) = ((taken >> 8) as u32, taken as u32 & 0xff);
    if is_v4 { Some(v4(index)?.bucket(slot, meta)) } else { Some(v6(index)?.bucket(slot, meta)) }
}

/// What the functions below answer when there is no slot to be had; else the line's index and the
/// slot, in the lower eight bits. They are functions of their own because a new source is rare, and
/// the instructions of every packet should lie close together.
const NOT_TAKEN: u64 = u64::MAX;

#[inline(never)]
fn claim_v4(bits: u64, lines: u64, meta: u32, now: u64) -> u64 {
    claim(bits, lines, Meta(meta), Tick(now), v4).unwrap_or(NOT_TAKEN)
}

#[inline(never)]
fn claim_v6(bits: u64, lines: u64, meta: u32, now: u64) -> u64 {
    claim(bits, lines, Meta(meta), Tick(now), v6).unwrap_or(NOT_TAKEN)
}

#[inline(always)]
fn claim<L: MapLine>(
    bits: u64,
    lines: u64,
    meta: Meta,
    now: Tick,
    line: impl Fn(u32) -> Option<L>,
) -> Option<u64> {
    let wanted = Wanted::of(bits, meta);
    let (first, second) = (line((lines >> 32) as u32)?, line(lines as u32)?);
    for line in [&first, &second] {
        match wanted.claim(line, meta, now) {
            Claim::Taken(slot) => return Some(line.place(slot)),
            Claim::Raced => return wanted.find(line).map(|(slot, _)| line.place(slot)),
            Claim::Full => {}
        }
    }
    match wanted.displace(&second, meta, now) {
        Claim::Taken(slot) => Some(second.place(slot)),
        Claim::Raced | Claim::Full => None,
    }
}

/// The packet bucket of a wider prefix; null if both of its lines are full.
#[inline(never)]
pub(crate) fn ceiling(bits: u64, kind: u32, class: u32, now: u64) -> *mut u64 {
    ceiling_of(WidePrefix { bits, kind }, ClassId(class), Tick(now))
        .map_or(ptr::null_mut(), |bucket| bucket.packets)
}

#[inline(always)]
fn ceiling_of(prefix: WidePrefix, class: ClassId, now: Tick) -> Option<BucketRef> {
    // A kind has the place of a space, so that prefixes of different lengths are different keys.
    let space = match prefix.kind {
        0 => Space::SixToFour,
        1 => Space::Ipv6,
        2 => Space::LinkLocal,
        _ => Space::Nat64,
    };
    let source = Source { space, bits: prefix.bits };
    let meta = Meta::owner(space, class);
    let wanted = Wanted::of(prefix.bits, meta);
    let key = MapEnv.key();
    let line = ceilings(key.bucket(key.source(source), class).first(LINES_CEILINGS.load()))?;
    let slot = match wanted.find(&line) {
        Some((slot, _)) => slot,
        None => match wanted.claim(&line, meta, now) {
            Claim::Taken(slot) => slot,
            Claim::Raced | Claim::Full => return None,
        },
    };
    Some(line.bucket(slot, meta))
}

#[inline(always)]
fn v4(index: u32) -> Option<V4> {
    BUCKETS_V4.get_ptr_mut(index).map(|line| V4 { line, index })
}

#[inline(always)]
fn v6(index: u32) -> Option<V6> {
    BUCKETS_V6.get_ptr_mut(index).map(|line| V6 { line, index, has_bytes: true })
}

#[inline(always)]
fn ceilings(index: u32) -> Option<V6> {
    CEILINGS.get_ptr_mut(index).map(|line| V6 { line, index, has_bytes: false })
}

/// A line in a map.
trait MapLine: Line {
    /// One of its slots as a bucket.
    fn bucket(&self, slot: u32, meta: Meta) -> BucketRef;
    /// Where one of its slots is.
    fn place(&self, slot: u32) -> u64;
}

/// A line of the IPv4 table.
struct V4 {
    line: *mut LineV4,
    index: u32,
}

/// A line of the IPv6 table, or of that of ceilings, which has no byte buckets.
struct V6 {
    line: *mut LineV6,
    index: u32,
    has_bytes: bool,
}

impl V4 {
    #[inline(always)]
    fn byte_cell(&self, slot: u32) -> Option<Tat> {
        bytes(true, self.index, slot)
    }
}

impl V6 {
    #[inline(always)]
    fn byte_cell(&self, slot: u32) -> Option<Tat> {
        if self.has_bytes { bytes(false, self.index, slot) } else { None }
    }
}

/// The byte bucket beside a slot, if any class limits bytes.
#[inline(always)]
fn bytes(is_v4: bool, index: u32, slot: u32) -> Option<Tat> {
    if BYTES.load() == 0 {
        return None;
    }
    let tats = if is_v4 { BYTES_V4.get_ptr_mut(index) } else { BYTES_V6.get_ptr_mut(index) };
    // SAFETY: within the map value.
    tats.map(|tats| Tat(unsafe { tats.cast::<u64>().add(bounded(slot, index)) }))
}

/// A bucket in the table.
pub(crate) struct BucketRef {
    packets: *mut u64,
    word: *mut Meta,
    meta: Meta,
    is_v4: bool,
    index: u32,
    slot: u32,
}

impl Bucket for BucketRef {
    type Cell = Tat;

    #[inline(always)]
    fn packets(&self) -> Tat {
        Tat(self.packets)
    }

    #[inline(always)]
    fn bytes(&self) -> Tat {
        // There is always one where it is asked for; any word will do for the compiler.
        bytes(self.is_v4, self.index, self.slot).unwrap_or(Tat(self.packets))
    }

    #[inline(always)]
    fn meta(&self) -> Meta {
        self.meta
    }

    #[inline(always)]
    fn set_meta(&self, meta: Meta) {
        swap(self.word, self.meta, meta);
    }
}

/// Stores `new` if the word is `current`, and returns what it was.
#[inline(always)]
fn swap(word: *mut Meta, current: Meta, new: Meta) -> Meta {
    let mut found = current.0;
    // SAFETY: an aligned word of a map value; BPF's cmpxchg compares with and returns in w0.
    unsafe {
        asm!("w0 = cmpxchg32_32({word} + 0, w0, {new})",
            word = in(reg) word, new = in(wreg) new.0, inout("w0") found);
    }
    Meta(found)
}

/// The slot as an index that the verifier sees the bound of, but not the value: so that what follows
/// is checked once and not once for each slot.
#[inline(always)]
fn bounded(slot: u32, index: u32) -> usize {
    let mut slot = slot as usize;
    // SAFETY: register arithmetic only: x ^ y ^ y is x, but the verifier does not work it out.
    unsafe {
        asm!("{s} ^= {i}", "{s} ^= {i}", "{s} &= {m}",
            s = inout(reg) slot, i = in(reg) u64::from(index), m = const V4_SLOTS - 1);
    }
    slot
}

macro_rules! line {
    ($line:ty, $slots:expr, $bits:ty, $is_v4:expr) => {
        impl MapLine for $line {
            #[inline(always)]
            fn bucket(&self, slot: u32, meta: Meta) -> BucketRef {
                let place = bounded(slot, self.index);
                // SAFETY: within the map value.
                let (packets, word) = unsafe {
                    (
                        (&raw mut (*self.line).packets).cast::<u64>().add(place),
                        (&raw mut (*self.line).metas).cast::<Meta>().add(place),
                    )
                };
                BucketRef { packets, word, meta, is_v4: $is_v4, index: self.index, slot }
            }

            #[inline(always)]
            fn place(&self, slot: u32) -> u64 {
                u64::from(self.index) << 8 | bounded(slot, self.index) as u64
            }
        }

        impl Line for $line {
            const SLOTS: u32 = $slots as u32;

            #[inline(always)]
            fn meta(&self, slot: u32) -> Meta {
                // SAFETY: an aligned word of the map value.
                unsafe { ptr::read_volatile(&raw const (*self.line).metas[slot as usize]) }
            }

            #[inline(always)]
            fn swap_meta(&self, slot: u32, current: Meta, new: Meta) -> Meta {
                // SAFETY: as above.
                swap(unsafe { &raw mut (*self.line).metas[slot as usize] }, current, new)
            }

            #[inline(always)]
            fn source(&self, slot: u32) -> u64 {
                // SAFETY: as above.
                unsafe { ptr::read_volatile(&raw const (*self.line).sources[slot as usize]) as u64 }
            }

            #[inline(always)]
            fn set_source(&self, slot: u32, bits: u64) {
                // SAFETY: as above; the slot is this CPU's alone while its meta says so.
                unsafe {
                    ptr::write_volatile(
                        &raw mut (*self.line).sources[slot as usize],
                        bits as $bits,
                    );
                }
            }

            #[inline(always)]
            fn busy_until(&self, slot: u32, now: Tick) -> Tick {
                // SAFETY: as above.
                let packets = Tick(unsafe {
                    ptr::read_volatile(&raw const (*self.line).packets[slot as usize])
                });
                match self.byte_cell(slot) {
                    Some(bytes) => {
                        let bytes = Tick(bytes.load());
                        if bytes.since(now) > packets.since(now) { bytes } else { packets }
                    }
                    None => packets,
                }
            }

            #[inline(always)]
            fn fill(&self, slot: u32, now: Tick) {
                // SAFETY: as above.
                unsafe {
                    ptr::write_volatile(&raw mut (*self.line).packets[slot as usize], now.0);
                }
                if let Some(bytes) = self.byte_cell(slot) {
                    // SAFETY: a word of the map value.
                    unsafe { ptr::write_volatile(bytes.0, now.0) };
                }
            }
        }
    };
}

line!(V4, V4_SLOTS, u32, true);
line!(V6, V6_SLOTS, u64, false);
