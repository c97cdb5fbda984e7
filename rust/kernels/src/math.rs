//! exp, log and the noise, from integer operations, fused multiply-adds and division alone, so that every instruction
//! set gives the same bits.

/// Constants and coefficients, shared with the vector versions.
pub(crate) mod constants {
    #![allow(clippy::excessive_precision, clippy::unreadable_literal)]

    pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
    /// Adding it leaves the rounded integer in the low bits.
    pub(crate) const ROUND: f32 = 12582912.0;
    /// ln 2 with few bits, so that its product with an exponent is exact.
    pub(crate) const LN2_HIGH: f32 = 0.693359375;
    pub(crate) const LN2_LOW: f32 = -2.12194440e-4;
    /// Below it exp is 0 in f32.
    pub(crate) const EXP_MIN: f32 = -104.0;
    /// Above it exp is infinite in f32.
    pub(crate) const EXP_MAX: f32 = 88.8;
    /// exp(r) = 1 + r + r² · polynomial, |r| <= ln 2 / 2; highest power first.
    pub(crate) const EXP: [f32; 6] =
        [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1];
    /// ln((1 + s) / (1 - s)) = 2 s + 2 s³ · polynomial in s², |s| <= 1/3; highest power first.
    pub(crate) const LN: [f32; 7] = [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0];
    /// Bits of sqrt(1/2), the lower end of the mantissa range of a logarithm.
    pub(crate) const SQRT_HALF_BITS: i32 = 0x3f3504f3;
    pub(crate) const TWO_TO_MINUS_32: f32 = 1.0 / 4294967296.0;
    pub(crate) const PHILOX_MULTIPLIERS: [u32; 2] = [0xD2511F53, 0xCD9E8D57];
    pub(crate) const PHILOX_WEYL: [u32; 2] = [0x9E3779B9, 0xBB67AE85];
    pub(crate) const PHILOX_ROUNDS: u32 = 10;
}

use constants as c;

use crate::draw::Coin;

/// e to the power `x`, within 2 units in the last place. `exp(-inf)` is 0, a NaN stays one.
pub fn exp(x: f32) -> f32 {
    let x = if c::EXP_MIN > x { c::EXP_MIN } else { x };
    let x = if c::EXP_MAX < x { c::EXP_MAX } else { x };
    let shifted = x.mul_add(c::LOG2_E, c::ROUND);
    let n = shifted - c::ROUND;
    let exponent = shifted.to_bits().wrapping_sub(c::ROUND.to_bits()).cast_signed();
    let r = n.mul_add(-c::LN2_LOW, n.mul_add(-c::LN2_HIGH, x));
    let mut polynomial = c::EXP[0];
    for coefficient in &c::EXP[1..] {
        polynomial = polynomial.mul_add(r, *coefficient);
    }
    let y = (r * r).mul_add(polynomial, r) + 1.0;
    // In two factors: 2^exponent alone is not a normal number at either end.
    let half = exponent >> 1;
    y * power_of_two(half) * power_of_two(exponent.wrapping_sub(half))
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(exponent.wrapping_add(127).cast_unsigned() << 23)
}

/// ln(2^exponent · (1 + f)) for f in [-1/2, sqrt 2 - 1].
fn ln_parts(f: f32, exponent: f32) -> f32 {
    let s = f / (2.0 + f);
    let square = s * s;
    let mut polynomial = c::LN[0];
    for coefficient in &c::LN[1..] {
        polynomial = polynomial.mul_add(square, *coefficient);
    }
    let double = s + s;
    let rest = exponent.mul_add(c::LN2_LOW, double * (square * polynomial));
    exponent.mul_add(c::LN2_HIGH, double + rest)
}

/// Splits a positive normal number into 2^exponent · (1 + f), f in [sqrt 1/2 - 1, sqrt 2 - 1].
fn split(x: f32) -> (f32, f32) {
    let bits = x.to_bits().cast_signed();
    let exponent = bits.wrapping_sub(c::SQRT_HALF_BITS) >> 23;
    let mantissa = f32::from_bits(bits.wrapping_sub(exponent << 23).cast_unsigned());
    (mantissa - 1.0, exponent as f32)
}

/// Natural logarithm, within 2 units in the last place. `ln(0)` is -inf, of a negative number NaN.
pub fn ln(x: f32) -> f32 {
    if x == 0.0 {
        return f32::NEG_INFINITY;
    }
    if x.is_nan() || x < 0.0 {
        return f32::NAN;
    }
    if x == f32::INFINITY {
        return x;
    }
    let (x, shift) = if x < f32::MIN_POSITIVE { (x * 16_777_216.0, -24.0) } else { (x, 0.0) };
    let (f, exponent) = split(x);
    ln_parts(f, exponent + shift)
}

/// A standard exponential variate, `-ln(1 - w)` with `w = (bits + 1/2) / 2^32`. Its relative error is small at both
/// ends: small variates are the large noise that decides draws.
pub fn exponential(bits: u32) -> f32 {
    let upper = bits.cast_signed() < 0;
    // w itself, or 1 - w where that is the smaller one: both are in (0, 1/2], so neither loses bits.
    let small = (if upper { !bits } else { bits }.cast_signed() as f32 + 0.5) * c::TWO_TO_MINUS_32;
    let (f, exponent) = if upper { split(small) } else { (-small, 0.0) };
    -ln_parts(f, exponent)
}

/// A standard Gumbel variate, `-ln(exponential(bits))`.
pub fn gumbel(bits: u32) -> f32 {
    let (f, exponent) = split(exponential(bits));
    -ln_parts(f, exponent)
}

/// Philox4x32-10 (Salmon et al., 2011): four random words for each counter and key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut x, mut key) = (counter, key);
    for _ in 0..c::PHILOX_ROUNDS {
        let first = u64::from(c::PHILOX_MULTIPLIERS[0]) * u64::from(x[0]);
        let second = u64::from(c::PHILOX_MULTIPLIERS[1]) * u64::from(x[2]);
        x = [(second >> 32) as u32 ^ x[1] ^ key[0], second as u32, (first >> 32) as u32 ^ x[3] ^ key[1], first as u32];
        key = [key[0].wrapping_add(c::PHILOX_WEYL[0]), key[1].wrapping_add(c::PHILOX_WEYL[1])];
    }
    x
}

/// The noise of a token at a draw. Four neighbouring tokens share one Philox block.
pub fn noise(coin: Coin, token: u32) -> f32 {
    let words = philox([token / 4, coin.position, coin.sample, 0], key(coin));
    gumbel(words[token as usize % 4])
}

pub(crate) fn key(coin: Coin) -> [u32; 2] {
    [coin.seed as u32, (coin.seed >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        let ulp = f64::from(f32::from_bits(nearest.abs().to_bits() + 1)) - f64::from(nearest.abs());
        ((f64::from(got) - exact) / ulp).abs()
    }

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -105.0 + 193.7 * (i as f32) / 2e6;
            worst = worst.max(ulps(exp(x), f64::from(x).exp()));
        }
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_at_its_ends() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-103.0) > 0.0);
    }

    #[test]
    fn ln_is_close_everywhere() {
        let mut worst = 0.0f64;
        for bits in (1..f32::INFINITY.to_bits()).step_by(1009) {
            let x = f32::from_bits(bits);
            worst = worst.max(ulps(ln(x), f64::from(x).ln()));
        }
        assert!(worst < 2.5, "{worst} ulp");
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert_eq!(ln(1.0), 0.0);
        assert!(ln(-1.0).is_nan() && ln(f32::NAN).is_nan());
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn noise_is_close_everywhere() {
        let edges = [0, 1, 2, 3, u32::MAX, u32::MAX - 1, 1 << 31, (1 << 31) - 1];
        for bits in edges.into_iter().chain((0..=u32::MAX).step_by(10_007)) {
            let w = (f64::from(bits) + 0.5) / 4_294_967_296.0;
            let exact = -(-w).ln_1p();
            let error = (f64::from(exponential(bits)) / exact - 1.0).abs();
            assert!(error < 4e-7, "exponential({bits}): relative error {error}");
            let error = (f64::from(gumbel(bits)) + exact.ln()).abs();
            assert!(error < 2e-6, "gumbel({bits}): error {error}");
        }
    }

    /// Known answers of Random123.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
