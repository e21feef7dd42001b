"""Math answers: golden pairs worked by hand, options, statuses, groups, golds that are refused, hostile texts."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlox_grpo.rewards import (
    STATUSES,
    Composite,
    Countdown,
    GSM8KAnswer,
    MajorityVote,
    MathAnswer,
    math_equal,
    unreadable_golds,
)

# Equal by the house rules, each pair by hand.
EQUAL = [
    (r"(\pm 1,\mp 2)", "(1,-2),(-1,2)"),
    (r"x+\pi y>0", r"-x-\pi y<0"),
    ("x+y>1", "-x-y<-1"),
    ("x+y>1", "2x>2-2y"),
    ("(2,3)", r"(1,1)\cup(2,3)"),
    (r"x^2+y^2\le 4", r"4\ge y^2+x^2"),
    ("0.5", "1/2"),
    ("0.5", r"50\%"),
    (r"\frac12", "0.50"),
    ("1,234", "1234"),
    ("1234", "1{,}234"),
    ("x>2", r"(2,\infty)"),
    (r"1<x\le 3", "(1,3]"),
    ("(1,3]", r"1 < x \leq 3"),
    ("|x|<2", "(-2,2)"),
    ("|x|<2", "-2<x<2"),
    ("x = 5", "5"),
    ("5", "x=5"),
    ("f(x)=x^2", "x^2"),
    ("x^2", "f(x) = x^2"),
    ("y=2x+1", "2x-y+1=0"),
    ("2x+3y=6", "4x+6y=12"),
    (r"x=1\pm\sqrt2", r"1+\sqrt{2}, 1-\sqrt{2}"),
    (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
    (r"\pm 3", "3, -3"),
    (r"\pm 3", "x=3 or x=-3"),
    (r"\cos 60^\circ", "1/2"),
    ("60", r"60^\circ"),
    (r"60^\circ", "60"),
    (r"60^\circ", r"\frac{\pi}{3}"),
    (r"\frac{\pi}{3}", r"60^\circ"),
    ("5", r"5 \text{ cm}"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}", "5 centimeters"),
    ("52_8", "42"),
    (r"3\frac12", "7/2"),
    ("100!", "100!"),
    ("2^{2024}", "4^{1012}"),
    ("9^{9^{9^9}}", "9^{9^{9^9}}"),
    (r"\log_2 8", "3"),
    (r"\ln 6", r"\ln 2+\ln 3"),
    (r"\lg 100", "2"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\sin 2x", r"2\sin x\cos x"),
    (r"e^{i\pi}", "-1"),
    ("(1+i)^2", "2i"),
    (r"\sqrt{-4}", "2i"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"\sqrt[3]{-8}", "-2"),
    ("2:4", "1:2"),
    (r"\{1,2\}", "2, 1"),
    ("1,2", r"\{2,1\}"),
    (r"\{1,2\}", r"\{1,1,2\}"),
    ("(1,2)", "(1,2)"),
    (r"(-\infty,1)\cup(3,\infty)", r"x<1 \text{ or } x>3"),
    (r"(3,\infty)\cup(-\infty,1)", r"(-\infty,1)\cup(3,\infty)"),
    (r"(-\infty, 2) \cup (2, \infty)", r"x \ne 2"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\langle 1,2\rangle"),
    (r"0.\overline{3}", r"\frac13"),
    (r"\binom{5}{2}", "10"),
    ("2x-4>0", "x>2"),
    ("-2x<4", "x>-2"),
    ("x^2<4", "(-2,2)"),
    (r"x^2-5x+6\ge 0", r"(-\infty,2]\cup[3,\infty)"),
    (r"\{x \mid x>2\}", r"(2,\infty)"),
    ("x=1, y=2", "(1,2)"),
    ("(x,y)=(1,2)", "x=1, y=2"),
    ("x=1,y=2", "y=2, x=1"),
    (r"x = \frac{k\pi}{2}, k\in\mathbb{Z}", r"x=\frac{\pi k}{2}"),
    (r"\text{Yes}", "yes"),
    ("B", "(B)"),
    ("B", r"\text{B}"),
    (r"\text{even}", "Even"),
    (r"\$5", "5"),
    (r"\$5", "5 dollars"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", r"-\frac12"),
    ("10^{-20}", "0.00000000000000000001"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    ("123,456,789", "123456789"),
    ("1, 2, 3", "3, 2, 1"),
    ("1, 2, 3", "x = 1, x = 2, x = 3"),
    (r"x=1 \text{ or } x=2", "1, 2"),
    ("2,3", r"x \in \{2,3\}"),
    ("[2,5]", r"2 \le x \le 5"),
    (r"\emptyset", r"\{\}"),
    (r"x \equiv 1 \pmod 5", r"x\equiv 6 \pmod 5"),
    ("5", "2+3=5"),
    ("5", r"\boxed{5}"),
    ("e^{x+y}", "e^x e^y"),
    (r"\frac{1}{2}\ln 4", r"\ln 2"),
    ("n!", r"n\cdot(n-1)!"),
    (r"\tan x", r"\frac{\sin x}{\cos x}"),
    (r"1.5\times10^3", "1500"),
    ("√2/2", r"\frac{\sqrt{2}}{2}"),
    ("½", "0.5"),
    ("−3", "-3"),
    ("2π", r"2\pi"),
    ("90°", r"\frac{\pi}{2}"),
    (r"\infty", r"\infty"),
    (r"-\infty", r"-\infty"),
    (r"(2, \frac{\pi}{3})", r"\left(2,\frac{\pi}{3}\right)"),
    (r"\frac{1}{x+1}+\frac{1}{x-1}", r"\frac{2x}{x^2-1}"),
    ("a+b", "b+a"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\left\lfloor 3.7\right\rfloor", "3"),
    (r"\gcd(12,18)", "6"),
    (r"\sum_{k=1}^{10} k", "55"),
    ("i^2", "-1"),
    ("3+4i", "4i+3"),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}"),
    ("x^2+y^2=1", "1 = x^2+y^2"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36"),
    ("y = x", "x = y"),
    ("x > 2", "2 < x"),
    (r"[1,2]\cup[2,3]", "[1,3]"),
    ("1:2:3", "2:4:6"),
    (r"12^\circ 30'", r"12.5^\circ"),
    (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2"),
    ("x^{-1}", r"\frac1x"),
    (r"\arcsin\frac12", r"\frac{\pi}{6}"),
    (r"\log_{10} 1000", "3"),
    (r"\cot x", r"1/\tan x"),
    (r"\frac{1+\sqrt5}{2}", r"\cos 36^\circ \cdot 2"),
    (r"(a,\infty)", "x>a"),
    ("1,234,567", "1234567"),
    ("1:2", "1/2"),
    (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
    (r"A \text{ and } C", "A, C"),
    ("A, C", "C, A"),
    (r"x\in(1,2)", "(1,2)"),
    ("(0,1)", "0<x<1"),
    (r"k=\pm 2", "k=2, -2"),
    (r"\{2k \mid k\in\mathbb{Z}\}", r"\{2k : k \in \mathbb Z\}"),
    ("x^2+x+1=0", "2x^2+2x+2=0"),
    (r"\frac{dy}{dx}=2x", "2x"),
    ("2x", r"\frac{dy}{dx}=2x"),
    ("5", "AB=5"),
    ("5", "a+b=5"),
    ("12", "xy=12"),
    (r"\frac{1}{2}", r"P(A)=\frac12"),
    (r"\frac{1}{2}", r"P(A\cap B)=0.5"),
    (r"60^\circ", r"\angle ABC=60^\circ"),
    ("5", "|AB|=5"),
    (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
    (r"\frac{x-1}{2}", r"f^{-1}(x)=\frac{x-1}{2}"),
    (r"x\in(-\infty,1]\cup[2,\infty)", r"(-\infty,1]\cup[2,\infty)"),
    (r"(-\infty,1]\cup[2,\infty)", r"x\le1\text{ or }x\ge2"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"),
    (r"\mathbb{R}\setminus\{0\}", r"x\neq 0"),
    (r"x\neq 0", r"\{x\mid x\neq0\}"),
    (r"x > 0, x \ne 1", r"(0,1)\cup(1,\infty)"),
    ("1<x<2", r"x>1\text{ and }x<2"),
    (r"2\sin\left(2x+\frac{\pi}{3}\right)", r"2\sin(2x+\pi/3)"),
    (r"y=\sin x", r"\sin x"),
    ("e^2", "e^{2}"),
    (r"\ln\frac{1}{2}", r"-\ln 2"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\log_4 9", r"\log_2 3"),
    (r"\sqrt[4]{16}", "2"),
    (r"\sqrt{50}", r"5\sqrt{2}"),
    (r"\frac{3\sqrt{7}}{7}", r"\frac{3}{\sqrt7}"),
    (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\sin 15^\circ"),
    (r"-2-\sqrt{3}", r"\frac{1}{\sqrt3-2}"),
    (r"3+\frac{1}{4}", r"3\frac{1}{4}"),
    (r"1\frac{1}{2}", "1.5"),
    (r"\frac{22}{7}", r"3\frac{1}{7}"),
    (r"10\%", "0.1"),
    ("0.1", r"10\%"),
    (r"1.23\times10^{5}", "123000"),
    (r"\text{June 20}", "June 20"),
    (r"\text{Tuesday}", "tuesday"),
    (r"(3,\frac{\pi}{2})", r"(3, \pi/2)"),
    ("(1,-2,3)", "(1, -2, 3)"),
    (r"\begin{pmatrix}-1/2\\3\end{pmatrix}", r"\begin{pmatrix}-0.5\\3\end{pmatrix}"),
    (r"i\sqrt{3}", r"\sqrt{-3}"),
    (r"\frac{-1+i\sqrt{3}}{2}", r"e^{2\pi i/3}"),
    (r"\cos\frac{2\pi}{3}+i\sin\frac{2\pi}{3}", r"-\frac12+\frac{\sqrt3}{2}i"),
    ("3-4i", "3 - 4 i"),
    (r"\overline{3+4i}", "3-4i"),
    ("|3+4i|", "5"),
    ("x^3-3x+2", "(x-1)^2(x+2)"),
    ("(x-1)(x-2)", "x^2-3x+2"),
    ("2^{n+1}-2", "2(2^n-1)"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}"),
    (r"\frac{n!}{(n-2)!}", "n(n-1)"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\binom{10}{3}", "120"),
    (r"\frac{10!}{3!7!}", "120"),
    (r"\pm\sqrt{2}", r"\sqrt2,-\sqrt2"),
    (r"\left\{-2,2\right\}", r"x=\pm2"),
    ("x=-2,2", r"\pm2"),
    ("-3,1", r"x=1\text{ and }x=-3"),
    (r"\frac{1}{2},-3", r"\left\{-3,0.5\right\}"),
    (r"\text{(A)}", "A"),
    (r"\textbf{(C)}", "C"),
    ("C", r"\text{C}"),
    ("(C)", "C"),
    (r"15\text{ cm}^2", "15"),
    (r"15\text{ cm}^2", r"15\,\mathrm{cm}^2"),
    (r"\$12.50", "12.5"),
    ("12.50", r"\$12.50"),
    ("45", r"45^{\circ}"),
    (r"\frac{\pi}{4}", r"45^\circ"),
    (r"3.0\times 10^8 \text{ m/s}", r"3\times10^8"),
    ("1011_2", "11"),
    (r"4\pi", "4π"),
    (r"4\sqrt{3}\pi", r"4\pi\sqrt{3}"),
    (r"\tan 45^\circ", "1"),
    (r"\sec^2x-\tan^2x", "1"),
    (r"\cos 2x", r"1-2\sin^2x"),
    (r"\cosh^2x-\sinh^2x", "1"),
    (r"\arctan 1", r"\frac{\pi}{4}"),
    (r"\arccos(-1)", r"\pi"),
    (r"\tan^{-1}(1)", r"\pi/4"),
    (r"\sin^{-1}(1/2)", r"\pi/6"),
    (r"\ln(e^3)", "3"),
    (r"e^{\ln 5}", "5"),
    (r"e^{3\ln 2}", "8"),
    (r"2^{\log_2 7}", "7"),
    (r"\frac{x}{2}+C", r"\frac{1}{2}x+C"),
    (r"\{(0,0),(1,1)\}", "(1,1),(0,0)"),
    ("(0,0),(1,1)", r"(1,1) \text{ and } (0,0)"),
    (r"x=0, y=0 \text{ or } x=1,y=1", "(0,0),(1,1)"),
    ("a=1,b=2,c=3", "(a,b,c)=(1,2,3)"),
    ("a=1,b=2,c=3", "(1,2,3)"),
    ("k>4", r"(4,\infty)"),
    (r"k\geq 4", r"[4,\infty)"),
    (r"m<-1 \text{ or } m>3", r"(-\infty,-1)\cup(3,+\infty)"),
    ("[-1,1]", r"-1\leq y\leq 1"),
    (r"y\in[-1,1]", "[-1,1]"),
    (r"\left[\frac{1}{2},\infty\right)", r"[0.5,\infty)"),
    (r"\emptyset", r"\varnothing"),
    (r"y=-\frac{2}{3}x+4", "2x+3y=12"),
    (r"y=-\frac{2}{3}x+4", "2x+3y-12=0"),
    ("x^2+y^2-4x=0", "(x-2)^2+y^2=4"),
    (r"\frac{x^2}{16}-\frac{y^2}{9}=1", "9x^2-16y^2=144"),
    (r"r=2\cos\theta", r"r = 2 \cos(\theta)"),
    ("3:4", "6:8"),
    ("3:4:5", "6:8:10"),
    (r"\frac{3}{4}", "3/4"),
    (".5", r"\frac{1}{2}"),
    ("1,000,000", "10^6"),
    ("1{,}000", "1000"),
    (r"2.5\text{ hours}", "2.5"),
    ("x", "1x"),
    ("4x", r"4 \cdot x"),
    ("xy", "yx"),
    ("a^2-b^2", "(a-b)(a+b)"),
    (r"\sqrt{a}\sqrt{b}", r"\sqrt{ab}"),
    ("|x|^2", "x^2"),
    (r"\max(3,5)", "5"),
    (r"\lfloor \pi \rfloor", "3"),
    (r"\lceil 2.1\rceil", "3"),
    (r"7\bmod 3", "1"),
    (r"n\equiv 3\pmod 7", r"3 \pmod 7"),
    (r"0.\overline{142857}", r"\frac17"),
    (r"0.9999\ldots", r"0.9999\ldots"),
    ("2^{10}", "1024"),
    (r"\frac{2^{100}}{2^{98}}", "4"),
    (r"\frac{1}{2^{99}}", "2^{-99}"),
    (r"x\le 5", r"5\ge x"),
    (r"3x+5\le 20", r"x\le5"),
    (r"-3<2x+1\le 7", "(-2,3]"),
    (r"|x-3|\le 2", "[1,5]"),
    (r"|x-3|\ge 2", r"(-\infty,1]\cup[5,\infty)"),
    (r"\frac{x-1}{x+2}\ge0", r"(-\infty,-2)\cup[1,\infty)"),
    (r"x^2\ge 0", r"\mathbb{R}"),
    ("x^2<0", r"\emptyset"),
    ("x^2-2<0", r"(-\sqrt2,\sqrt2)"),
    ("f(x)=x+1", "y=x+1"),
    ("(x-1)^2=4", "x^2-2x-3=0"),
    (r"\text{True}", "true"),
    (r"\text{odd}", r"\text{odd}"),
    ("1/x", "x^{-1}"),
    ("x^{1/2}", r"\sqrt{x}"),
    (r"\frac{a}{b}", "a/b"),
    (r"\frac{x+y}{xy}", r"\frac1x+\frac1y"),
    (r"\sqrt{x+1}-\sqrt{x}", r"\frac{1}{\sqrt{x+1}+\sqrt{x}}"),
    (r"\frac{1-\cos 2x}{2}", r"\sin^2x"),
    (r"\ln(x+1)-\ln x", r"\ln\frac{x+1}{x}"),
    (r"\log_3(x)", r"\frac{\ln x}{\ln 3}"),
    (r"-\ln|\cos x|", r"\ln|\sec x|"),
    (r"\frac{1}{2}\ln|\frac{x-1}{x+1}|", r"\frac{1}{2}(\ln|x-1|-\ln|x+1|)"),
    ("x^x", r"e^{x\ln x}"),
    (r"\sqrt[3]{x^2}", "x^{2/3}"),
    ("(-1)^{n+1}", "(-1)^{n-1}"),
    (r"\cos n\pi", "(-1)^n"),
    (r"\frac{1+(-1)^n}{2}", r"\frac{1+\cos n\pi}{2}"),
    (r"k\pi, k\in\mathbb{Z}", r"n\pi, n\in\mathbb{Z}"),
    (r"x=\frac{\pi}{6}+2k\pi, k\in\mathbb Z", r"x=2\pi n+\frac{\pi}{6}, n \in \mathbb{Z}"),
    ("f(x)=x^2", "f(t)=t^2"),
    (r"\frac{\pi}{6}+2k\pi", r"\frac{\pi}{6}+2k\pi, k\in\mathbb{Z}"),
    (r"2 \text{ and } 3", "3, 2"),
    (r"7\text{ and }8", r"\{7,8\}"),
    (r"\text{none}", r"\text{None}"),
    (r"10\text{ ways}", "10"),
    (r"x=3,\ y=4,\ z=5", "(3,4,5)"),
    (r"\left(\frac{1}{2},\frac{3}{4}\right)", "(0.5, 0.75)"),
    (r"\mathbf{i}+2\mathbf{j}", r"\mathbf{i}+2\mathbf{j}"),
    ("10^{10^{10}}", "10^{10^{10}}"),
    ("10^{10^{10}}+1", "1+10^{10^{10}}"),
    (r"\sin 10^{20}", r"\sin(10^{20})"),
]

# Different: near misses, other shapes, hedges, restatements, and what has no value.
DIFFERENT = [
    (r"(\pm 1,\mp 2)", "(1,2),(-1,-2)"),
    (r"x+\pi y>0", r"-x-\pi y>0"),
    ("x+y>1", "-x-y>-1"),
    ("x+y>1", "x+y<1"),
    ("1,2", "1,2,3"),
    (r"x^2+y^2\le 4", r"x^2+y^2\ge 4"),
    ("(2,3)", r"[1,1]\cup(2,3)"),
    ("x+y=1", "x+y=x+y"),
    ("1/3", "0.33"),
    ("1/3", "0.333333"),
    (r"\pi", "3.14"),
    (r"\pi", "3.141592653589793"),
    ("10^{-20}", r"2\cdot 10^{-20}"),
    ("10^{20}", "10^{20}+1"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("2", "1 or 2 or 3"),
    ("2", "1, 2"),
    ("2", r"\{1,2\}"),
    ("5", "x"),
    ("5", "0=0"),
    ("x+y=5", "0=0"),
    ("x=5", "0=0"),
    ("x+y=5", "x+y=6"),
    ("x=5", "y=5"),
    ("5", "6=5"),
    ("5", "1/0"),
    ("0", "0/0"),
    (r"\infty", r"-\infty"),
    ("0", r"\infty-\infty"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2]", "[1,2)"),
    ("x>2", r"x\ge 2"),
    ("x>2", "x<2"),
    ("x>2", "y>2"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"100\text{ cm}", "1 m"),
    ("52_8", "52_7"),
    ("52_8", "52"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    ("1,1,2", "1,2"),
    (r"60^\circ", r"60\text{ cm}"),
    (r"\cos 60", r"\frac12"),
    ("x^2", "x^3"),
    ("9^{9^{9^9}}", "9"),
    ("9^{9^{9^9}}", "0"),
    ("x=1,y=2", "x=2,y=1"),
    ("x=1,y=2", "(2,1)"),
    ("1", "-1"),
    ("A", "B"),
    ("A", "C"),
    ("yes", "no"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("1:2", "2:1"),
    ("1,234", "12,34"),
    ("[1,2]", r"\{1,2\}"),
    (r"\sqrt2", "1.41421356237"),
    (r"\sqrt2", r"\sqrt2+10^{-400}"),
    ("2", r"\sqrt4, -2"),
    (r"(-\infty,1)\cup(3,\infty)", r"(-\infty,1]\cup(3,\infty)"),
    ("5", "5, 5"),
    ("5", "x>5"),
    ("5", r"x \ge 5"),
    ("x=5", "2x"),
    (r"\pm 3", "3"),
    ("3", r"\pm 3"),
    (r"\sqrt{x^2}", "x"),
    ("x^2+y^2=1", "x^2+y^2=-1"),
    ("x^2 < 4", "x<2"),
    (r"5\text{ dollars}", r"5\text{ euros}"),
    (r"2 \text{ hours}", r"2\text{ minutes}"),
    (r"x\equiv 1\pmod 5", r"x\equiv 2\pmod 5"),
    (r"x\equiv 1\pmod 5", r"x\equiv 1\pmod 7"),
    (r"\frac{1}{x}", r"\frac{1}{x+10^{-30}}"),
    (r"\emptyset", r"\{0\}"),
    (r"\emptyset", "0"),
    (r"\{1\}", "2"),
    (r"\ln x", r"\log_{2} x"),
    ("3x+2", "3y+2"),
    ("f(x)=2", "g(x)=3"),
    ("1/2", r"\frac{1}{2}x"),
    ("7", "7 or 8"),
    (r"2 \text{ or } 3", "2"),
    ("(1,2)", "1"),
    (r"\text{no solution}", "0"),
    ("-x", "x"),
    ("5", "|5-10|+10^{-50}"),
    ("x^2+x+1=0", "x^2+x+2=0"),
    ("5", "AB=6"),
    ("x+y=5", "5"),
    ("5", "x+3=5"),
    ("10", "2x=10"),
    ("5", "5=x+1"),
    ("2x", r"\frac{dy}{dx}=3x"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}"),
    (r"x\neq 0", r"x\neq 1"),
    ("x>0", r"x\geq0, x\ne1"),
    ("(1,2)", "(1,2,3)"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("[1,2)", r"1\le x\le2"),
    (r"\sqrt{50}", r"5\sqrt{3}"),
    ("i", "-i"),
    ("i", "1"),
    ("3-4i", "3+4i"),
    (r"\pm\sqrt2", r"\sqrt2"),
    (r"\sin x", r"\cos x"),
    (r"y=\sin x", r"y=\cos x"),
    (r"15\text{ cm}^2", r"15\text{ cm}"),
    (r"15\text{ cm}^2", r"15\text{ m}^2"),
    (r"\$12.50", r"12.50\text{ euros}"),
    (r"45^\circ", r"45\text{ rad}"),
    (r"\tan 45", "1"),
    ("x=1,y=2", "x=1"),
    ("x=1", "x=1,y=2"),
    ("1", "x=1,y=2"),
    ("f(x)=x+1", "f(x)=x-1"),
    (r"x\le5", "x<5"),
    (r"\mathbb{R}", r"\mathbb{Q}"),
    (r"\mathbb{Z}", r"\mathbb{N}"),
    ("(0,0),(1,1)", "(0,0)"),
    ("(0,0)", "(0,0),(1,1)"),
    ("2x+3", "2x+3=0"),
    ("0", "x=x"),
    ("1", "1=1=2"),
    (r"\frac{x}{2}+C", r"\frac{x}{2}"),
    ("x^2", "x^2+C"),
    ("7", r"\text{seven or eight}"),
    ("7", r"7\text{ or maybe }8"),
    ("7", "7?8"),
    ("2", r"1\le x\le 3"),
    ("2", "[1,3]"),
    ("2", "(1,3)"),
    ("2", r"\mathbb{R}"),
    (r"\{2\}", r"\mathbb{N}"),
    ("2", r"x\in\mathbb{R}"),
    ("x>2", r"\mathbb{R}"),
    ("2", "x^2=4"),
    ("2", r"\sqrt{4}\text{ or }-\sqrt4"),
    ("2", r"\max(2,x)"),
    ("3", r"\lfloor x\rfloor"),
    ("e", "2.718281828"),
    (r"\frac{22}{7}", r"\pi"),
    ("0.3", r"\frac{1}{3}"),
    (r"0.\overline{3}", "0.3333333333"),
    ("100", "10^{2}+10^{-50}"),
    ("1", r"0.\overline{9}-10^{-100}"),
    (r"\frac{1}{3}:\frac{1}{2}", "3:2"),
    ("(2,3]", "[2,3)"),
    (r"\{x\mid x>2\}", r"\{x\mid x<2\}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix}1&0\\0&1\end{pmatrix}", "1"),
    ("5", "5x"),
    ("5", "5!"),
    ("24", "4"),
    ("x", "x!"),
    ("AB", "A+B"),
    ("12", "1,2"),
    ("123", "1,2,3"),
    ("1,2,3", "123"),
    ("1,234", "1,2,3,4"),
    ("1234", "1,2,3,4"),
    ("10", "10_2"),
    ("9^{9^{9^9}}", "9^{9^{9^9}}+1"),
    (r"\sqrt{x}+\sqrt{y}", r"\sqrt{x+y}"),
    (r"\ln(xy)", r"\ln x\ln y"),
    ("(a+b)^2", "a^2+b^2"),
    (r"\frac{a+b}{c+d}", r"\frac ac+\frac bd"),
    (r"\sin(a+b)", r"\sin a+\sin b"),
    ("|x+y|", "|x|+|y|"),
    ("x^{-1}", "-x"),
    ("2^{3^2}", "64"),
    ("-2^2", "4"),
    (r"\frac{1}{2}x", r"\frac{1}{2x}"),
    ("1/2x", r"\frac{1}{3x}"),
    (r"\cos n\pi", "(-1)^{n+1}"),
    (r"k\pi", r"2k\pi"),
    ("A", r"\text{A or B}"),
    ("A", "A, B"),
    (r"\text{A}", r"\text{B}"),
    (r"\text{yes}", r"\text{yes and no}"),
    (r"\text{even}", r"\text{odd}"),
    (r"\text{Evelyn}", r"\text{Carla}"),
    (r"x\equiv 1\pmod 5", "1"),
    (r"5 \pmod 7", r"5 \pmod 8"),
    (r"\infty", "10^{10^{10}}"),
    ("0", "10^{-10^{10}}"),
    ("0", r"\frac{1}{9^{9^{9^9}}}"),
    ("1", "(1+10^{-50})^{1}"),
    ("5", r"\frac{5x}{x+10^{-60}}"),
    ("x", r"x+0\cdot\frac{1}{0}"),
    ("1", r"\frac{0}{0}+1"),
    ("1", r"\frac{x-x}{x-x}"),
    ("0", r"\log 0 - \log 0"),
    ("1", "0^0"),
    ("1", r"1^\infty"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert math_equal(gold, answer) is True


@given(
    st.integers(1, 10**6),
    st.sampled_from(["The answer is {}.", "#### {}", "<answer>{}</answer>", "So {}", r"so \boxed{{{}}}"]),
    st.data(),
)
def test_a_wrong_answer_by_sign_digit_or_negation_is_never_paid(gold: int, text: str, data: st.DataObject) -> None:
    digits = str(gold)
    at = data.draw(st.integers(0, len(digits) - 1))
    digit = data.draw(st.sampled_from("0123456789\u0967\u0968".replace(digits[at], "")))
    wrong = data.draw(
        st.sampled_from(
            [
                *(text.format(dash + digits) for dash in "-\u2010\u2013\u2212\uff0d"),
                text.format(digits[:at] + digit + digits[at + 1 :]),
                text.format("\u0336".join(digits) + "\u0336"),
                text.format(f"~~{digits}~~"),
                text.format(rf"\cancel{{{digits}}}"),
                text.format(f"not {digits}"),
                f"The answer isn't {digits}.",
                rf"It cannot be \boxed{{{digits}}}.",
                f"The answer is {gold + 1}, not {digits}.",
            ]
        )
    )
    rows: dict[str, Any] = {"completions": [wrong], "answer": [digits]}
    assert MathAnswer()(**rows) == GSM8KAnswer()(**rows) == [0.0], wrong


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str) -> None:
    assert math_equal(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answer", "option"),
    [
        ("1/3", "0.33", {"tolerance": 0.02}),
        (r"\pi", "3.14", {"tolerance": 1e-3}),
        (r"\sqrt2, 3", "3, 1.414", {"tolerance": 1e-3}),
        ("0", "0.001", {"tolerance": 0.01}),
        (r"1\text{ m}", r"100\text{ cm}", {"units": "convert"}),
        (r"2\text{ hours}", r"120\text{ minutes}", {"units": "convert"}),
        (r"5\text{ m}", r"5\text{ cm}", {"units": "ignore"}),
        ("52_8", "52", {"base": "optional"}),
        ("(1, 2)", "1, 2", {"brackets": "optional"}),
        ("(1, 2)", r"\{1, 2\}", {"brackets": "optional"}),
        ("x = 5", "2x + 1 = 11", {"unsolved": "right"}),
        ("x > 2", "2x - 4 > 0", {"unsolved": "right"}),
        ("(-2, 2)", "x^2 < 4", {"unsolved": "right"}),
        ("[1, 5]", r"|x - 3| \le 2", {"unsolved": "right"}),
        (r"(-2, 2) \cup (3, 4)", r"x^2 < 4 \text{ or } 3 < x < 4", {"unsolved": "right"}),
    ],
)
def test_an_option_relaxes_what_is_strict_by_default(gold: str, answer: str, option: dict[str, Any]) -> None:
    assert math_equal(gold, answer) is False
    assert math_equal(gold, answer, **option) is True
    rule = MathAnswer(**option)
    assert rule(completions=[rf"\boxed{{{answer}}}"], answer=[gold]) == [1.0]


@pytest.mark.parametrize(
    ("gold", "answer", "option"),
    [
        ("1/3", "0.33", {"tolerance": 0.001}),
        ("50", r"5\%", {"percent": "optional"}),
        ("50", r"50\%", {"percent": "exact"}),
        (r"50\%", "50", {"percent": "exact"}),
        (r"-50\%", "-50", {"percent": "exact"}),
        (r"1\text{ m}", r"100\text{ kg}", {"units": "convert"}),
        (r"1\text{ m}", r"10\text{ cm}", {"units": "convert"}),
        ("52_8", "53", {"base": "optional"}),
        ("(1, 2)", "2, 1", {"brackets": "optional"}),
        ("5", r"5\text{ cm}", {"units": "exact"}),
    ],
)
def test_an_option_relaxes_nothing_else(gold: str, answer: str, option: dict[str, Any]) -> None:
    assert math_equal(gold, answer, **option) is False


@pytest.mark.parametrize(
    "option",
    [
        {"tolerance": -1.0},
        {"tolerance": float("nan")},
        {"percent": "both"},
        {"units": "si"},
        {"base": "ten"},
        {"unsolved": "?"},
        {"unevaluated": "?"},
    ],
)
def test_unknown_options_are_refused(option: dict[str, Any]) -> None:
    name = next(iter(option))
    for make in (MathAnswer, MajorityVote):
        with pytest.raises(ValueError, match=f"^{name} is "):
            make(**option)
    with pytest.raises(ValueError, match=f"^{name} is "):
        math_equal("1", "1", **option)


def test_what_is_beyond_reach_is_undecided_and_scores_as_asked() -> None:
    gold, answer = "(10^9)!", r"10^9 \cdot (10^9-1)!"
    assert math_equal(gold, answer) is None
    texts = [rf"\boxed{{{answer}}}", r"\boxed{5}"]
    assert MathAnswer()(completions=texts, answer=[gold, gold]) == [0.0, 0.0]
    assert MathAnswer(undecided=None)(completions=texts, answer=[gold, gold]) == [None, 0.0]
    assert MathAnswer(undecided=0.5)(completions=texts, answer=[gold, gold]) == [0.5, 0.0]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "none"])
def test_the_score_of_undecided_answers_is_checked_before_the_first_one(score: Any) -> None:
    for make in (MathAnswer, MajorityVote, GSM8KAnswer, Countdown):
        with pytest.raises(ValueError, match="^undecided is "):
            make(undecided=score)


def test_every_sample_has_a_status() -> None:
    texts = [r"\boxed{1}", "no idea", r"\boxed{\frac{1}{}", r"\boxed{" + "(" * 5000 + "}", r"\boxed{1/0}"]
    verdicts = MathAnswer().verdicts(texts, {"answer": ["1"] * len(texts)})
    names = [STATUSES[status] for status in verdicts.statuses]
    assert names[0] == "ok"
    assert names[1] == "no_answer"
    assert names[2] in ("no_answer", "unparseable")
    assert names[3] in ("undecided", "unparseable")
    assert names[4] == "ok"
    assert verdicts.scores.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("gold", [None, "", " ", "1/0", r"\frac{1}{", r"0^{-1}", r"\infty-\infty"])
def test_bad_golds_are_refused_by_row_and_value(gold: Any) -> None:
    with pytest.raises(ValueError, match=r"math_answer: answer\[1\] is "):
        MathAnswer()(completions=["1", "1"], answer=["1", gold])


def test_golds_may_be_numbers_or_solutions() -> None:
    golds = [3, 0.5, "so 3\n#### 1,000", r"hence $\boxed{\frac12}$."]
    texts = ["#### 3", r"\boxed{\frac12}", "The answer is 1000.", "<answer>0.5</answer>"]
    assert MathAnswer()(completions=texts, answer=golds) == [1.0] * 4


def test_numbers_of_any_type_count_by_their_shortest_decimal() -> None:
    golds = [0.1, np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int8(3), Fraction(1, 3), Decimal("1E+3")]
    texts = ["#### 0.1"] * 4 + ["#### 3", "#### 1/3", "#### 1000"]
    for rule in (MathAnswer(), GSM8KAnswer()):
        assert rule(completions=texts, answer=golds) == [1.0] * 7


def test_the_end_of_a_number_with_marks_is_no_answer() -> None:
    for text in ("It is 12'500.", "12’500", "12_500"):
        assert MathAnswer()(completions=[text] * 2, answer=["500", "12"]) == [0.0, 0.0], text


def test_majority_votes_by_value() -> None:
    texts = [r"\boxed{0.5}", r"\boxed{2}", r"\boxed{\frac{1}{2}}", "none", "1", "2", r"\boxed{1}", "3"]
    expected = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert MajorityVote(group_size=4)(completions=texts) == expected
    prompts = ["p"] * 4 + ["q"] * 4
    assert MajorityVote()(completions=texts, prompts=prompts) == expected
    both = Composite((MajorityVote(), MathAnswer()))
    assert both(completions=texts, prompts=prompts, answer=["2"] * 8)[1] == 1.0


def test_ties_are_shared_and_the_order_says_nothing() -> None:
    assert MajorityVote(group_size=4)(completions=["1", "2", "2", "1"]) == [1.0] * 4
    assert MajorityVote(group_size=3)(completions=["x", "y", "z"]) == [0.0] * 3
    assert MajorityVote(group_size=2)(completions=["7", "8"]) == [1.0, 1.0]


def test_groups_must_be_known() -> None:
    with pytest.raises(ValueError, match="majority_vote: prompts are missing"):
        MajorityVote()(completions=["1"])
    with pytest.raises(ValueError, match="group_size is 2, which does not divide 3"):
        MajorityVote(group_size=2)(completions=["1", "1", "1"])
    with pytest.raises(ValueError, match="group_size is 2, but completions 2 and 3 have different prompts"):
        MajorityVote(group_size=2)(completions=["1"] * 6, prompts=["a", "a", "a", "b", "b", "b"])
    with pytest.raises(ValueError, match="group_size is 0"):
        MajorityVote(group_size=0)
    assert MajorityVote()(completions=[], prompts=[]) == []


def test_rules_keep_the_protocol() -> None:
    for rule in (MathAnswer(tolerance=0.1), MajorityVote(group_size=1)):
        assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301
        assert rule.__name__.isidentifier()
    messages = [[{"role": "assistant", "content": r"\boxed{5}"}]]
    assert MathAnswer()(prompts=["p"], completions=messages, answer=["5"], trainer_state=object()) == [1.0]


HOSTILE = {
    "braces": "{" * 10**6,
    "parentheses": "(" * 10**6,
    "fractions": r"\frac{1}{" * 10_000 + "2" + "}" * 10_000,
    "roots": r"\sqrt{" * 2_500 + "2" + "}" * 2_500,
    "surrogates": "\ud800" * 100 + "1",
    "nul": "1\x002",
    "digits": "9" * 10**6,
    "tower": "9^{9^{9^9}}",
    "tall tower": "^".join(["9"] * 60),
    "factorial": "(10^9)!",
    "binomial": r"\binom{10^9}{5 \cdot 10^8}",
    "power of a sum": "(x+y+z+w)^{200}",
    "difference of towers": "10^{10^{10}}-10^{10^{10}}",
    "list": ",".join(str(n % 97) for n in range(4096)),
    "list of roots": ",".join(rf"\sqrt{{{n}}}" for n in range(1000)),
    "sum of fractions": "+".join(rf"\frac{{1}}{{{n}}}" for n in range(1, 900)),
    "sum of sines": "+".join(rf"\sin {n}" for n in range(1, 900)),
    "sum over sums": r"\sum_{i=1}^{1000}" * 4 + "i",
    "product of decimals": r"\cdot ".join(["1.23456789"] * 1000),
    "inequalities": ",".join(f"x>{n}" for n in range(1000)),
    "equations": ",".join(f"x_{{{n}}}={n}" for n in range(200)),
    "signs": "+".join([r"\pm 1"] * 1000),
    "unions": r"\cup".join(rf"(\sqrt{{{n}}},\sqrt{{{n + 1}}})" for n in range(400)),
    "determinant": r"\det\begin{pmatrix}" + r"\\".join("&".join("x" * 40) for _ in range(40)) + r"\end{pmatrix}",
    "long power": "(1+\\sqrt2)^{10^{9}}",
    "commas": "1,234," * 2000 + "5",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_bounded(name: str) -> None:
    text = HOSTILE[name]
    assert math_equal("7", text) in (False, None)
    start = time.process_time()
    assert MathAnswer()(completions=[rf"\boxed{{{text}}}"] * 8, answer=["7"] * 8) == [0.0] * 8
    # 2 ms each of one core; a power that is written out takes minutes.
    assert time.process_time() - start < 2.0
    assert math_equal(text, text) in (True, False, None)


def test_verdicts_do_not_depend_on_threads() -> None:
    texts = [rf"\boxed{{{answer}}}" for _, answer in EQUAL + DIFFERENT]
    golds = [gold for gold, _ in EQUAL + DIFFERENT]
    expected = MathAnswer(undecided=None)(completions=texts, answer=golds)
    one_by_one = [MathAnswer(undecided=None)(completions=[t], answer=[g])[0] for t, g in zip(texts, golds, strict=True)]
    assert one_by_one == expected
    with ThreadPoolExecutor(4) as pool:
        runs = pool.map(lambda _: MathAnswer(undecided=None)(completions=texts, answer=golds), range(8))
        assert all(run == expected for run in runs)


def test_reading_is_linear_in_the_completion() -> None:
    def seconds(size: int) -> float:
        text = "Some reasoning with 12 numbers and $x^2$ formulas. " * (size // 50) + r"\boxed{42}"
        start = time.process_time()
        assert MathAnswer()(completions=[text], answer=["42"]) == [1.0]
        return time.process_time() - start

    seconds(1 << 16)
    small, large = (min(seconds(size) for _ in range(5)) for size in (1 << 18, 1 << 21))
    # Eight times the text; a quadratic scan would take 64 times as long.
    assert large < 24 * small + 0.01


BAD = ["1", r"\int_0^1 f", "2", "1/0", None]


def test_every_gold_that_cannot_be_read_is_named() -> None:
    found = unreadable_golds(BAD)
    assert [(bad.row, bad.gold) for bad in found] == [(1, BAD[1]), (3, "1/0"), (4, None)]
    assert all(bad.reason for bad in found)
    assert unreadable_golds([]) == []
    assert unreadable_golds([1, 0.5, "x", np.int64(3)]) == []
    with pytest.raises(ValueError, match="3 of 5 golds cannot be read") as error:
        MathAnswer()(completions=["1"] * 5, answer=BAD)
    for row in ("answer[1]", "answer[3]", "answer[4]", "on_bad_gold='skip'"):
        assert row in str(error.value)


class Column:
    """A column of a table that has lost rows: its index is no count."""

    def __init__(self, values: list[Any]) -> None:
        self.values = dict(enumerate(values, start=10))

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.values())

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def test_the_column_of_a_table_is_read_in_its_order() -> None:
    assert unreadable_golds(Column(BAD)) == unreadable_golds(BAD)  # type: ignore[arg-type]
    rule = MathAnswer(on_bad_gold="skip")
    with pytest.warns(UserWarning, match="has no score|have no score"):
        assert rule(completions=["3"] * 2, answer=Column([r"\int_0^2 f", "3"])) == [None, 1.0]
    votes = MajorityVote()(prompts=Column(["a", "a", "b"]), completions=["1", "1", "2"])
    assert votes == MajorityVote(group_size=1)(completions=["1", "1", "2"])


def test_many_bad_golds_are_all_named_and_few_are_shown() -> None:
    golds = ["1", *["1/0"] * 500]
    with pytest.raises(ValueError, match="500 of 501 golds cannot be read") as error:
        MathAnswer()(completions=["1"] * 501, answer=golds)
    assert str(error.value).count("answer[") == 20
    assert str(error.value).endswith("without a score")
    assert ", 500;" in str(error.value)


def test_rows_of_bad_golds_can_be_left_without_a_score() -> None:
    rule = MathAnswer(on_bad_gold="skip")
    golds = [r"\int_0^1 \text{skip me once}", "1", None, "2"]
    with pytest.warns(UserWarning, match=r"answer\[0\] .*answer\[2\].*2 of 4 golds cannot be read"):
        assert rule(completions=["1"] * 4, answer=golds) == [None, 1.0, None, 0.0]
    # Warnings are errors here: the same golds are not told again, batch for batch.
    assert rule(completions=["1"] * 4, answer=golds) == [None, 1.0, None, 0.0]
    assert rule(completions=["1"], answer=[golds[0]]) == [None]
    verdicts = rule.verdicts(["no idea"] * 4, {"answer": golds})
    assert [STATUSES[status] for status in verdicts.statuses] == ["ok", "no_answer", "ok", "no_answer"]
    assert rule(completions=["1", "2"], answer=["1", "2"]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="on_bad_gold is 'drop', expected one of stop, skip"):
        MathAnswer(on_bad_gold="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("56088", r"123 \times 456"),
        ("1024", "2^{10}"),
        ("5", "2+3"),
        ("7", "84/12"),
        ("42", "52_8"),
        ("x = 42", "x = 12 + 30"),
        ("(2, 5)", "(1 + 1, 5)"),
    ],
)
def test_arithmetic_that_is_left_to_do_does_not_answer_a_number(gold: str, answer: str) -> None:
    row: dict[str, Any] = {"completions": [rf"\boxed{{{answer}}}"], "answer": [gold]}
    assert MathAnswer()(**row) == [0.0]
    assert MathAnswer(unevaluated="right")(**row) == [1.0]
    assert math_equal(gold, answer) is True
    assert math_equal(gold, answer, unevaluated="wrong") is False


def test_copies_of_the_problem_are_no_majority() -> None:
    texts = [r"\boxed{3\cdot4}", r"\boxed{4\cdot3}", r"\boxed{12}"]
    assert MajorityVote()(completions=texts, prompts=["p"] * 3) == [0.0, 0.0, 1.0]
    assert MajorityVote(unevaluated="right")(completions=texts, prompts=["p"] * 3) == [1.0] * 3
