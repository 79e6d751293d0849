//! The bucket table's lines in maps.

use core::{arch::asm, ptr};

use limiter_common::{
    Bucket, Env as _,
    abi::{ClassId, LineV4, LineV6, V4_CROWDED, V4_SLOTS, V6_CROWDED, V6_SLOTS},
    bucket::{self, Cell as _, Moment},
    env::WidePrefix,
    hash::BucketHash,
    packet::{Source, Space},
    table::{Claim, Line, Made, Meta, Wanted},
    time::Tick,
};

use crate::{
    env::{MapEnv, Tat},
    maps::{
        BUCKETS_V4, BUCKETS_V6, BYTES, BYTES_V4, BYTES_V6, CEILINGS, LINES_CEILINGS, LINES_V4,
        LINES_V6,
    },
    view::hidden,
};

/// The bucket of `source` in `class`.
#[inline(always)]
pub(crate) fn find(source: Source, class: ClassId, hash: BucketHash) -> Option<BucketRef> {
    let wanted = Wanted::new(source, class);
    let is_v4 = matches!(source.space, Space::Ipv4);
    let (place, meta) = if is_v4 {
        let lines = LINES_V4.load();
        find_in(&wanted, hash.first(lines), hash.second(lines), v4)
    } else {
        let lines = LINES_V6.load();
        find_in(&wanted, hash.first(lines), hash.second(lines), v6)
    };
    BucketRef::at(is_v4, place, meta)
}

/// Its place and meta.
#[inline(always)]
fn find_in<L: MapLine>(
    wanted: &Wanted,
    first: u32,
    second: u32,
    line: impl Fn(u32) -> Option<L>,
) -> (u64, Meta) {
    for index in [first, second] {
        let Some(line) = line(index) else { break };
        let (slot, meta) = wanted.locate(&line);
        if slot != L::SLOTS {
            // Hidden, so that what follows is checked once and not for each slot.
            return (line.place(L::opaque(slot, meta)), meta);
        }
    }
    (NOWHERE, Meta::EMPTY)
}

/// A slot for the bucket of `source`, in either line: a free one, or else that of an owner who has
/// proven nothing; and whether it was made here, or by another CPU meanwhile.
#[inline(always)]
pub(crate) fn make(
    source: Source,
    hash: BucketHash,
    meta: Meta,
    now: Tick,
) -> Option<(BucketRef, bool)> {
    let is_v4 = matches!(source.space, Space::Ipv4);
    let lines = if is_v4 { LINES_V4.load() } else { LINES_V6.load() };
    let (first, second) = (u64::from(hash.first(lines)), u64::from(hash.second(lines)));
    let taken = if is_v4 {
        claim_v4(source.bits, first << 32 | second, meta.0, now.0)
    } else {
        claim_v6(source.bits, first << 32 | second, meta.0, now.0)
    };
    let is_new = taken & FOUND == 0;
    BucketRef::at(is_v4, taken & !FOUND, meta).map(|bucket| (bucket, is_new))
}

/// Marks the place of a bucket that another CPU made.
const FOUND: u64 = 1 << 63;

/// No place. A place is the line's index and, in the lower eight bits, the slot.
const NOWHERE: u64 = u64::MAX >> 1;

// Global functions, which the verifier checks once and not on each path that leads to them. A new
// source is rare, while the instructions of every packet should lie close together.

#[unsafe(no_mangle)]
extern "C" fn claim_v4(bits: u64, lines: u64, meta: u32, now: u64) -> u64 {
    claim(bits, lines, Meta(meta), Tick(now), v4).unwrap_or(NOWHERE)
}

#[unsafe(no_mangle)]
extern "C" fn claim_v6(bits: u64, lines: u64, meta: u32, now: u64) -> u64 {
    claim(bits, lines, Meta(meta), Tick(now), v6).unwrap_or(NOWHERE)
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
    match wanted.make(&first, &second, meta, now) {
        Made::First(slot) => Some(first.place(slot)),
        Made::Second(slot) => Some(second.place(slot)),
        Made::Raced => found_soon(&wanted, &first, &second).map(|place| place | FOUND),
        Made::Full => None,
    }
}

/// Where the bucket is that another CPU is just making, if it is for the same source.
#[inline(always)]
fn found_soon<L: MapLine>(wanted: &Wanted, first: &L, second: &L) -> Option<u64> {
    /// Taking a slot is a few writes.
    const ATTEMPTS: usize = 4;
    for _ in 0..ATTEMPTS {
        for line in [first, second] {
            if let Some((slot, _)) = wanted.find(line) {
                return Some(line.place(slot));
            }
        }
    }
    None
}

/// Charges the ceiling of a wider prefix with `cost` if that conforms; 0 if not. `owner` is its kind,
/// and its class in the upper half.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn admit_ceiling(
    bits: u64,
    owner: u64,
    now: u64,
    cost: u64,
    tolerance: u64,
) -> u32 {
    let prefix = WidePrefix { bits, kind: owner as u32 };
    let tat = ceiling(prefix, ClassId((owner >> 32) as u32), Tick(now));
    // Where there is no room for one, there is none.
    tat.is_none_or(|tat| {
        let mut moment = Moment::new(Tick(now), || Tick(now));
        bucket::admit(&tat, &mut moment, cost, tolerance)
    }) as u32
}

#[inline(always)]
fn ceiling(prefix: WidePrefix, class: ClassId, now: Tick) -> Option<Tat> {
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
    Some(line.packets(slot))
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
    /// The packet bucket of one of its slots.
    fn packets(&self, slot: u32) -> Tat;
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
    tats.map(|tats| Tat(unsafe { tats.cast::<u64>().add(within(slot)) }))
}

/// A bucket in the table.
pub(crate) struct BucketRef {
    is_v4: bool,
    place: u64,
    meta: Meta,
}

impl BucketRef {
    #[inline(always)]
    fn at(is_v4: bool, place: u64, meta: Meta) -> Option<Self> {
        if place == NOWHERE {
            return None;
        }
        Some(Self { is_v4, place, meta })
    }

    #[inline(always)]
    fn index(&self) -> u32 {
        (self.place >> 8) as u32
    }

    #[inline(always)]
    fn slot(&self) -> u32 {
        self.place as u32 & 0xff
    }
}

impl Bucket for BucketRef {
    type Cell = Tat;

    #[inline(always)]
    fn packets(&self) -> Option<Tat> {
        if self.is_v4 {
            v4(self.index()).map(|line| line.packets(self.slot()))
        } else {
            v6(self.index()).map(|line| line.packets(self.slot()))
        }
    }

    #[inline(always)]
    fn bytes(&self) -> Option<Tat> {
        bytes(self.is_v4, self.index(), self.slot())
    }

    #[inline(always)]
    fn meta(&self) -> Meta {
        self.meta
    }

    #[inline(always)]
    fn set_meta(&self, meta: Meta) {
        if self.is_v4 {
            if let Some(line) = v4(self.index()) {
                line.swap_meta(self.slot(), self.meta, meta);
            }
        } else if let Some(line) = v6(self.index()) {
            line.swap_meta(self.slot(), self.meta, meta);
        }
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

macro_rules! line {
    ($line:ty, $slots:expr, $crowded:expr, $bits:ty) => {
        impl MapLine for $line {
            #[inline(always)]
            fn packets(&self, slot: u32) -> Tat {
                // SAFETY: within the map value.
                Tat(unsafe { (&raw mut (*self.line).packets).cast::<u64>().add(within(slot)) })
            }

            #[inline(always)]
            fn place(&self, slot: u32) -> u64 {
                u64::from(self.index) << 8 | u64::from(slot)
            }
        }

        impl $line {
            #[inline(always)]
            fn meta_word(&self, slot: u32) -> *mut Meta {
                // SAFETY: within the map value.
                unsafe { (&raw mut (*self.line).metas).cast::<Meta>().add(within(slot)) }
            }

            #[inline(always)]
            fn source_word(&self, slot: u32) -> *mut $bits {
                // SAFETY: within the map value.
                unsafe { (&raw mut (*self.line).sources).cast::<$bits>().add(within(slot)) }
            }
        }

        impl Line for $line {
            const SLOTS: u32 = $slots as u32;
            const CROWDED: u32 = $crowded;

            #[inline(always)]
            fn meta(&self, slot: u32) -> Meta {
                // SAFETY: an aligned word of the map value.
                unsafe { ptr::read_volatile(self.meta_word(slot)) }
            }

            #[inline(always)]
            fn swap_meta(&self, slot: u32, current: Meta, new: Meta) -> Meta {
                swap(self.meta_word(slot), current, new)
            }

            #[inline(always)]
            fn source(&self, slot: u32) -> u64 {
                // SAFETY: as above.
                unsafe { ptr::read_volatile(self.source_word(slot)) as u64 }
            }

            #[inline(always)]
            fn set_source(&self, slot: u32, bits: u64) {
                // SAFETY: as above; the slot is this CPU's alone while its meta says so.
                unsafe { ptr::write_volatile(self.source_word(slot), bits as $bits) };
            }

            #[inline(always)]
            fn busy_until(&self, slot: u32, now: Tick) -> Tick {
                let packets = Tick(self.packets(slot).load());
                let Some(bytes) = self.byte_cell(slot) else { return packets };
                let bytes = Tick(bytes.load());
                if bytes.since(now) > packets.since(now) { bytes } else { packets }
            }

            #[inline(always)]
            fn opaque(value: u32, unknown: Meta) -> u32 {
                hidden(value, unknown.0.into())
            }

            #[inline(always)]
            fn fill(&self, slot: u32, now: Tick) {
                // SAFETY: as above.
                unsafe { ptr::write_volatile(self.packets(slot).0, now.0) };
                if let Some(bytes) = self.byte_cell(slot) {
                    // SAFETY: a word of the map value.
                    unsafe { ptr::write_volatile(bytes.0, now.0) };
                }
            }
        }
    };
}

line!(V4, V4_SLOTS, V4_CROWDED, u32);
line!(V6, V6_SLOTS, V6_CROWDED, u64);

/// The slot as an index that the verifier sees the bound of. A fourth slot of an IPv6 line, which
/// there is not, would still lie in the line.
#[inline(always)]
fn within(slot: u32) -> usize {
    slot as usize & (V4_SLOTS - 1)
}
