//! The measures: names, symbols, dimensions and factors.

use std::collections::HashMap;
use std::sync::LazyLock;

/// How many base dimensions there are: length, mass, time, current, temperature, amount, luminosity, information.
pub const DIMENSIONS: usize = 8;

pub(super) type Dimension = [i8; DIMENSIONS];

/// A measure by name.
pub(super) struct Measure {
    pub(super) names: &'static [&'static str],
    pub(super) symbols: &'static [&'static str],
    pub(super) dimension: Dimension,
    pub(super) factor: (u64, u64, i8),
    pub(super) metric: bool,
}

const fn measure(
    names: &'static [&'static str],
    symbols: &'static [&'static str],
    dimension: Dimension,
    factor: (u64, u64, i8),
    metric: bool,
) -> Measure {
    Measure { names, symbols, dimension, factor, metric }
}

const LENGTH: Dimension = [1, 0, 0, 0, 0, 0, 0, 0];
const AREA: Dimension = [2, 0, 0, 0, 0, 0, 0, 0];
const VOLUME: Dimension = [3, 0, 0, 0, 0, 0, 0, 0];
const MASS: Dimension = [0, 1, 0, 0, 0, 0, 0, 0];
const TIME: Dimension = [0, 0, 1, 0, 0, 0, 0, 0];
const SPEED: Dimension = [1, 0, -1, 0, 0, 0, 0, 0];
const FREQUENCY: Dimension = [0, 0, -1, 0, 0, 0, 0, 0];
const CURRENT: Dimension = [0, 0, 0, 1, 0, 0, 0, 0];
const TEMPERATURE: Dimension = [0, 0, 0, 0, 1, 0, 0, 0];
const AMOUNT: Dimension = [0, 0, 0, 0, 0, 1, 0, 0];
const LUMINOSITY: Dimension = [0, 0, 0, 0, 0, 0, 1, 0];
const INFORMATION: Dimension = [0, 0, 0, 0, 0, 0, 0, 1];
const FORCE: Dimension = [1, 1, -2, 0, 0, 0, 0, 0];
const ENERGY: Dimension = [2, 1, -2, 0, 0, 0, 0, 0];
const POWER: Dimension = [2, 1, -3, 0, 0, 0, 0, 0];
const PRESSURE: Dimension = [-1, 1, -2, 0, 0, 0, 0, 0];
const CHARGE: Dimension = [0, 0, 1, 1, 0, 0, 0, 0];
const VOLTAGE: Dimension = [2, 1, -3, -1, 0, 0, 0, 0];
const RESISTANCE: Dimension = [2, 1, -3, -2, 0, 0, 0, 0];
const CAPACITANCE: Dimension = [-2, -1, 4, 2, 0, 0, 0, 0];
const FLUX: Dimension = [2, 1, -2, -1, 0, 0, 0, 0];
const FIELD: Dimension = [0, 1, -2, -1, 0, 0, 0, 0];
const INDUCTANCE: Dimension = [2, 1, -2, -2, 0, 0, 0, 0];
pub(super) const NONE: Dimension = [0; DIMENSIONS];

/// The measures by their symbols and their names: every word behind a number is looked up, some with twenty prefixes.
pub(super) struct Index {
    pub(super) symbols: HashMap<&'static str, &'static Measure>,
    pub(super) names: HashMap<&'static str, &'static Measure>,
}

pub(super) static INDEX: LazyLock<Index> = LazyLock::new(|| {
    let mut index = Index { symbols: HashMap::new(), names: HashMap::new() };
    for measure in &MEASURES {
        for symbol in measure.symbols {
            index.symbols.insert(*symbol, measure);
        }
        for name in measure.names {
            index.names.insert(*name, measure);
        }
    }
    index
});

/// Factors are `top / bottom · 10^power`, exact by definition of the unit; years, months and the like have 365, 30 days.
static MEASURES: [Measure; 64] = [
    measure(&["meter", "metre"], &["m"], LENGTH, (1, 1, 0), true),
    measure(&["inch"], &["in"], LENGTH, (254, 1, -4), false),
    measure(&["foot", "feet"], &["ft"], LENGTH, (3048, 1, -4), false),
    measure(&["yard"], &["yd", "yds"], LENGTH, (9144, 1, -4), false),
    measure(&["mile"], &["mi"], LENGTH, (1_609_344, 1, -3), false),
    measure(&["nautical-mile"], &["nmi"], LENGTH, (1852, 1, 0), false),
    measure(&["angstrom"], &[], LENGTH, (1, 1, -10), false),
    measure(&["light-year", "lightyear"], &["ly"], LENGTH, (9_460_730_472_580_800, 1, 0), false),
    measure(&["parsec"], &["pc"], LENGTH, (30_856_775_814_913_673, 1, 0), true),
    measure(&["astronomical-unit"], &["AU", "au"], LENGTH, (149_597_870_700, 1, 0), false),
    measure(&["acre"], &["ac"], AREA, (40_468_564_224, 1, -7), false),
    measure(&["hectare"], &["ha"], AREA, (1, 1, 4), false),
    measure(&["liter", "litre"], &["L", "l"], VOLUME, (1, 1, -3), true),
    measure(&["cc"], &["cc"], VOLUME, (1, 1, -6), false),
    measure(&["gallon"], &["gal"], VOLUME, (3_785_411_784, 1, -12), false),
    measure(&["quart"], &["qt"], VOLUME, (946_352_946, 1, -12), false),
    measure(&["pint"], &["pt"], VOLUME, (473_176_473, 1, -12), false),
    measure(&["cup"], &[], VOLUME, (2_365_882_365, 1, -13), false),
    measure(&["tablespoon"], &["tbsp"], VOLUME, (1_478_676_478_125, 1, -17), false),
    measure(&["teaspoon"], &["tsp"], VOLUME, (492_892_159_375, 1, -17), false),
    measure(&["gram", "gramme"], &["g"], MASS, (1, 1, -3), true),
    measure(&["tonne", "metric-ton"], &["t"], MASS, (1, 1, 3), true),
    measure(&["pound"], &["lb", "lbs"], MASS, (45_359_237, 1, -8), false),
    measure(&["ounce"], &["oz"], MASS, (28_349_523_125, 1, -12), false),
    measure(&["ton"], &[], MASS, (90_718_474, 1, -5), false),
    measure(&["second"], &["s", "sec", "secs"], TIME, (1, 1, 0), true),
    measure(&["minute"], &["min", "mins"], TIME, (60, 1, 0), false),
    measure(&["hour"], &["h", "hr", "hrs"], TIME, (3600, 1, 0), false),
    measure(&["day"], &["d"], TIME, (86_400, 1, 0), false),
    measure(&["week"], &["wk", "wks"], TIME, (604_800, 1, 0), false),
    measure(&["month"], &["mo"], TIME, (2_592_000, 1, 0), false),
    measure(&["year"], &["yr", "yrs"], TIME, (31_536_000, 1, 0), false),
    measure(&[], &["mph"], SPEED, (1_609_344, 3600, -3), false),
    measure(&[], &["kph", "kmh", "kmph"], SPEED, (1000, 3600, 0), false),
    measure(&["knot"], &["kn"], SPEED, (1852, 3600, 0), false),
    measure(&["hertz"], &["Hz"], FREQUENCY, (1, 1, 0), true),
    measure(&[], &["rpm"], FREQUENCY, (1, 60, 0), false),
    measure(&["ampere", "amp"], &["A"], CURRENT, (1, 1, 0), true),
    measure(&["kelvin"], &["K"], TEMPERATURE, (1, 1, 0), true),
    measure(&["mole"], &["mol"], AMOUNT, (1, 1, 0), true),
    measure(&["candela"], &["cd"], LUMINOSITY, (1, 1, 0), false),
    measure(&["lumen"], &["lm"], LUMINOSITY, (1, 1, 0), false),
    measure(&["bit"], &["bit", "bits"], INFORMATION, (1, 1, 0), true),
    measure(&["byte"], &["B"], INFORMATION, (8, 1, 0), true),
    measure(&["newton"], &["N"], FORCE, (1, 1, 0), true),
    measure(&["dyne"], &["dyn"], FORCE, (1, 1, -5), false),
    measure(&["joule"], &["J"], ENERGY, (1, 1, 0), true),
    measure(&["erg"], &["erg", "ergs"], ENERGY, (1, 1, -7), false),
    measure(&["calorie"], &["cal"], ENERGY, (4184, 1, -3), true),
    measure(&["electronvolt", "electron-volt"], &["eV"], ENERGY, (1_602_176_634, 1, -28), true),
    measure(&[], &["Wh"], ENERGY, (3600, 1, 0), true),
    measure(&["watt"], &["W"], POWER, (1, 1, 0), true),
    measure(&["horsepower"], &["hp"], POWER, (74_569_987_158_227_022, 1, -14), false),
    measure(&["pascal"], &["Pa"], PRESSURE, (1, 1, 0), true),
    measure(&["atmosphere"], &["atm"], PRESSURE, (101_325, 1, 0), false),
    measure(&["bar"], &["bar"], PRESSURE, (1, 1, 5), true),
    measure(&["coulomb"], &["C"], CHARGE, (1, 1, 0), true),
    measure(&["volt"], &["V"], VOLTAGE, (1, 1, 0), true),
    measure(&["ohm"], &["Omega", "Ohm"], RESISTANCE, (1, 1, 0), true),
    measure(&["farad"], &["F"], CAPACITANCE, (1, 1, 0), true),
    measure(&["weber"], &["Wb"], FLUX, (1, 1, 0), true),
    measure(&["tesla"], &["T"], FIELD, (1, 1, 0), true),
    measure(&["henry"], &["H"], INDUCTANCE, (1, 1, 0), true),
    measure(&["radian"], &["rad", "rads"], NONE, (1, 1, 0), true),
];

pub(super) const SYMBOL_PREFIXES: [(&str, i8); 10] =
    [("k", 3), ("c", -2), ("m", -3), ("d", -1), ("M", 6), ("G", 9), ("T", 12), ("u", -6), ("n", -9), ("p", -12)];

pub(super) const WORD_PREFIXES: [(&str, i8); 11] = [
    ("kilo", 3),
    ("centi", -2),
    ("milli", -3),
    ("deci", -1),
    ("hecto", 2),
    ("mega", 6),
    ("giga", 9),
    ("tera", 12),
    ("micro", -6),
    ("nano", -9),
    ("pico", -12),
];
