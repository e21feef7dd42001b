//! Identities of functions, and texts that are nearly one: another branch, another domain, another sign, a little more.

use super::super::super::answer::compare;
use super::super::super::compare::Options;
use crate::equality::Equality;

fn verdict(gold: &str, answer: &str) -> Equality {
    compare(gold, answer, &Options::default())
}

#[test]
fn laws_of_logarithms_and_circular_functions() {
    for (gold, answer) in [
        (r"\ln\frac{\cos\frac x2+\sin\frac x2}{\cos\frac x2-\sin\frac x2}", r"\ln|\sec x+\tan x|"),
        (r"\cos x(1-\ln\sin x)+\ln\tan\frac x2", r"\cos x-\cos x\ln|\sin x|-\ln|\csc x+\cot x|"),
        (
            r"\cos x(1-\ln\sin x)+\ln\tan\frac x2",
            r"-\cos x\ln|\sin x|+\cos x-\frac12\ln|1+\cos x|+\frac12\ln|1-\cos x|",
        ),
        (r"\ln\frac{\sqrt{1-x}-1}{1+\sqrt{1-x}}", r"\ln(\sqrt{1-x}-1)-\ln(1+\sqrt{1-x})"),
        (r"1+\arcsin x+\arccos x", r"\arcsin x+\arccos x+\sin^2x+\cos^2x"),
        (r"\arcsin x+\arccos x+x", r"\frac{\pi}{2}+x"),
        (r"-\frac13\sqrt{16-x^2}(x^2+32)", r"\frac{16}{3}\cos(3\arcsin\frac x4)-48\cos\arcsin\frac x4"),
        (r"\frac{1}{n+2}((n+1)^{\frac{1}{n+1}})^{n+2}", r"\frac{(n+1)^{\frac{n+2}{n+1}}}{n+2}"),
        (r"\sin 5x", r"16\sin^5x-20\sin^3x+5\sin x"),
        (r"\cos(x+\frac{\pi}{3})", r"\frac12\cos x-\frac{\sqrt3}{2}\sin x"),
        (r"\arctan x+\arctan y", r"\arctan y+\arctan x"),
        (r"2\arctan x", r"\arcsin\frac{2x}{1+x^2}+2\arctan x-\arcsin\frac{2x}{x^2+1}"),
        (r"\ln(x+\sqrt{x^2+1})", r"\operatorname{arsinh}x"),
        (r"\ln(x+\sqrt{x^2+1})", r"-\ln(\sqrt{x^2+1}-x)"),
        (r"\frac12\ln\frac{1+x}{1-x}", r"\operatorname{artanh}x"),
        (r"\frac12\ln(1+x)-\frac12\ln(1-x)", r"\operatorname{artanh}x"),
        (r"\frac{e^{2x}-1}{e^{2x}+1}", r"\tanh x"),
        (r"4\arctan\frac15-\arctan\frac1{239}", r"\frac{\pi}{4}"),
        (r"12\arctan\frac1{18}+8\arctan\frac1{57}-5\arctan\frac1{239}", r"\frac{\pi}{4}"),
        (r"\ln\sqrt{x^2+2x+1}", r"\ln|x+1|"),
        (r"x^x", r"e^{x\ln x}"),
        (r"\sqrt1+\sqrt2+\sqrt3+\sqrt4+\sqrt5+\sqrt6", r"\cot\frac{\pi}{20}+\cot\frac{\pi}{24}-\cot\frac{\pi}{10}"),
    ] {
        assert_eq!(verdict(gold, answer), Equality::Equal, "{gold} = {answer}");
    }
    assert_eq!(
        verdict(
            r"\tan(ka)=-\frac kq\tan(qa)",
            r"\tan(ka)=\frac{k(\sin(qa)-\tan(2qa)\cos(qa))}{q(\cos(qa)+\tan(2qa)\sin(qa))}"
        ),
        Equality::Equal
    );
}

#[test]
fn another_branch_domain_or_sign_is_not_paid() {
    for (gold, answer) in [
        // Another branch of the same germ.
        (r"\arctan x+\arctan\frac1x", r"\frac{\pi}{2}"),
        (r"\arcsin\sin x", "x"),
        (r"\arccos\cos x", "x"),
        (r"\arctan\tan x", "x"),
        (r"2\arctan x", r"\arcsin\frac{2x}{1+x^2}"),
        (r"2\arctan x", r"\arctan\frac{2x}{1-x^2}"),
        (r"\arctan x+\arctan y", r"\arctan\frac{x+y}{1-xy}"),
        (r"\arctan 2+\arctan 3", r"\arctan(-1)"),
        (r"\arctan 2+\arctan 3", r"-\frac{\pi}{4}"),
        (r"\arctan 2+\arctan 3", r"\frac{7\pi}{4}"),
        (r"\arccos x", r"\arcsin\sqrt{1-x^2}"),
        (r"\arcsin(xz)", r"\arccos\sqrt{1-(xz)^2}"),
        (r"\arccos x+\ln z", r"\arcsin\sqrt{1-x^2}+\ln z"),
        (r"\frac{\sqrt z}{\arccos x}", r"\frac{\sqrt z}{\arcsin\sqrt{1-x^2}}"),
        (r"\arccos(1-x)+x", r"\arcsin\sqrt{1-(1-x)^2}+x"),
        (r"\ln z+\arctan x", r"\ln z+\frac{\pi}{2}-\arctan\frac1x"),
        (r"\arctan(x+2)+x", r"\frac{\pi}{2}-\arctan\frac1{x+2}+x"),
        (r"\arcsin x", r"\arcsin x+2\pi"),
        (r"\arcsin x+\arccos x", r"\frac{3\pi}{2}"),
        (r"4\arctan\frac15-\arctan\frac1{239}", r"\frac{5\pi}{4}"),
        (r"\arg(-1)", r"-\pi"),
        // Another domain.
        (r"\ln x^2", r"2\ln x"),
        (r"\ln|x|", r"\ln x"),
        (r"\frac12\ln(1-x)^2", r"\ln(1-x)"),
        (r"\ln|\sec x+\tan x|", r"\ln(\sec x+\tan x)"),
        (r"\sqrt{x^2-2x+1}", "x-1"),
        (r"\sqrt{x^2-2x+1}", "1-x"),
        (r"\sqrt{1-\sin^2x}", r"\cos x"),
        (r"|x-1|+|x-2|", "2x-3"),
        (r"|\ln x|", r"\ln x"),
        (r"\frac{x}{|x|}", "1"),
        (r"|x-1000|", "1000-x"),
        (r"\ln(x-1000)^2", r"2\ln(1000-x)"),
        (r"\sqrt{(x+5000)^2}", "x+5000"),
        // Another sign, factor or letter.
        (r"\ln(x+\sqrt{x^2+1})", r"\ln(\sqrt{x^2+1}-x)"),
        (r"\ln(x+\sqrt{x^2-1})", r"-\ln(x+\sqrt{x^2-1})"),
        (r"\sin(x-y)", r"\sin(y-x)"),
        (r"\sin\frac x2", r"\frac12\sin x"),
        (r"\ln(2x)", r"\ln x"),
        (r"\ln(2x)", r"2\ln x"),
        (r"\ln(x+1)", r"\ln x+1"),
        (r"e^{x+y}", r"e^x+e^y"),
        (r"e^{x}", r"e^{-x}"),
        (r"\cos(x+\frac{\pi}{3})", r"\frac12\cos x+\frac{\sqrt3}{2}\sin x"),
        (r"x^{2x}", r"(2x)^x"),
        (r"(-x)^{x}", r"x^x"),
        (r"\sqrt{x}", r"-\sqrt{x}"),
        (r"\tan(x+y)", r"\frac{\tan x+\tan y}{1+\tan x\tan y}"),
        (r"\tan(ka)=-\frac kq\tan(qa)", r"\tan(ka)=\frac kq\tan(qa)"),
    ] {
        assert_ne!(verdict(gold, answer), Equality::Equal, "{gold} = {answer}");
        assert_ne!(verdict(&format!("{gold}+y"), &format!("{answer}+y")), Equality::Equal, "{gold} = {answer}, and y");
    }
}

#[test]
fn a_little_more_is_not_the_same() {
    for digits in [5, 15, 25, 30, 45, 90, 200] {
        let little = format!("10^{{-{digits}}}");
        for (gold, answer) in [
            (r"\arcsin x+\arccos x+x".to_owned(), format!(r"\frac{{\pi}}{{2}}+x+{little}")),
            (r"\arcsin x+\arccos x+x".to_owned(), format!(r"\frac{{\pi}}{{2}}+x+{little}\pi")),
            (r"\arcsin x+\arccos x+x".to_owned(), format!(r"\frac{{\pi}}{{2}}+x(1+{little})")),
            (r"\arctan 2+\arctan 3".to_owned(), format!(r"\frac{{3\pi}}{{4}}(1+{little})")),
            (r"\arctan 2+\arctan 3".to_owned(), format!(r"\frac{{3\pi}}{{4}}+{little}\ln 2")),
            (r"\ln|\sec x+\tan x|".to_owned(), format!(r"\ln|\sec x+\tan x+{little}|")),
            (r"\sin 3x".to_owned(), format!(r"3\sin x-4\sin^3x+{little}\sin x")),
            (r"\sin 3x".to_owned(), format!(r"3\sin x-4\sin^3((1+{little})x)")),
            // The branches differ, by a little.
            (format!(r"x+{little}\ln x^2"), format!(r"x+2\cdot{little}\ln x")),
            (format!(r"x+{little}|x|"), format!(r"x+{little}x")),
            (format!(r"x+{little}\sqrt{{x^2}}"), format!(r"x+{little}x")),
            (format!(r"x+{little}\arcsin\sin x"), format!(r"x+{little}x")),
            (format!(r"x+{little}(\arctan 2+\arctan 3)"), format!(r"x-{little}\frac{{\pi}}{{4}}")),
            (format!(r"1+{little}(\arctan 2+\arctan 3)"), format!(r"1-{little}\frac{{\pi}}{{4}}")),
            (format!(r"x+e^{{-{digits}}}\ln x^2"), format!(r"x+2e^{{-{digits}}}\ln x")),
        ] {
            assert_ne!(verdict(&gold, &answer), Equality::Equal, "{gold} = {answer}");
        }
    }
}
