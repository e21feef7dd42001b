//! Criterion over what a grader does with an answer: extract it, read it, compare it with the gold.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use math_answers::extraction::stated;
use math_answers::{math_equal, parse};

fn extraction(bench: &mut Criterion) {
    let mut group = bench.benchmark_group("stated");
    for bytes in [1 << 10, 1 << 20] {
        let text = "Try $x = 4$, then $x^2 = 16$, which is it. ".repeat(bytes / 44) + r"So \boxed{\frac{1}{2}}.";
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_with_input(bytes.to_string(), &text, |bencher, text| bencher.iter(|| stated(black_box(text))));
    }
}

/// Gold and answer, from the cheapest to the dearest.
const PAIRS: [(&str, &str, &str); 6] = [
    ("number", "1/2", "0.5"),
    ("set", r"\{1, 2, 3\}", "3, 2, 1"),
    ("interval", r"(-\infty, 2] \cup [3, \infty)", r"x^2 - 5x + 6 \ge 0"),
    ("radicals", r"\sqrt{3 + 2\sqrt{2}}", r"1 + \sqrt{2}"),
    ("function", r"\sin 2x", r"2 \sin x \cos x"),
    ("different", r"\frac{\pi^2}{6}", "1.6449340668482"),
];

fn answers(bench: &mut Criterion) {
    for (name, gold, answer) in PAIRS {
        bench.bench_function(&format!("parse/{name}"), |bencher| bencher.iter(|| parse(black_box(answer))));
        bench.bench_function(&format!("math_equal/{name}"), |bencher| {
            bencher.iter(|| math_equal(black_box(gold), black_box(answer)));
        });
    }
}

criterion_group!(benches, extraction, answers);
criterion_main!(benches);
