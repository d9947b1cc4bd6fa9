//! Ties are fair, temperatures mean the same at any scale of costs.

use super::*;
use expect_test::expect;

fn lowest(costs: &[f64], rng: &mut Rng) -> Option<(u32, WinReason)> {
    let mut lowest = LowestCost::new();
    for (slot, cost) in costs.iter().enumerate() {
        lowest.offer(*cost, slot as u32, rng);
    }
    lowest.won()
}

#[test]
fn the_lowest_wins_and_nothing_is_drawn_for_it() {
    let mut rng = Rng::new(1);
    assert_eq!(
        lowest(&[3.0, 1.0, 2.0], &mut rng),
        Some((1, WinReason::LowestCost))
    );
    assert_eq!(rng, Rng::new(1));
    assert_eq!(lowest(&[], &mut rng), None);
    assert_eq!(
        lowest(&[f64::INFINITY], &mut rng),
        Some((0, WinReason::LowestCost))
    );
}

#[test]
fn exact_ties_are_drawn_evenly_and_near_ties_are_not() {
    let mut rng = Rng::new(7);
    let mut counts = [0; 4];
    for _ in 0..30_000 {
        let (slot, won) = lowest(&[1.0, 2.0, 1.0, 1.0], &mut rng).unwrap();
        assert_eq!(won, WinReason::Tie { among: 3 });
        counts[slot as usize] += 1;
    }
    assert_eq!(counts[1], 0);
    let even = |c: &i32| (9_700..10_300).contains(c);
    assert!([0, 2, 3].iter().all(|i| even(&counts[*i])), "{counts:?}");
    let near = f64::from_bits(1.0f64.to_bits() + 1);
    assert_eq!(
        lowest(&[near, 1.0], &mut rng),
        Some((1, WinReason::LowestCost))
    );
}

fn shares(costs: &[f64], temperature: f64) -> Vec<f64> {
    let mut rng = Rng::new(11);
    let mut counts = vec![0u32; costs.len()];
    for _ in 0..50_000 {
        let mut list: Vec<_> = costs.iter().zip(0..).map(|(c, i)| (*c, i)).collect();
        let (slot, won) = draw(&mut list, temperature, &mut rng).unwrap();
        assert!(matches!(won, WinReason::Sampled { probability } if probability > 0.0));
        counts[slot as usize] += 1;
    }
    counts.iter().map(|c| f64::from(*c) / 50_000.0).collect()
}

/// Costs 0, half, all of the span: weights 1, e^(-0.5/T), e^(-1/T).
#[test]
fn a_temperature_is_a_softmax_over_normalised_costs() {
    let mut rows = String::from("T     cheapest  middle  dearest\n");
    for temperature in [0.1, 0.5, 1.0, 5.0] {
        let s = shares(&[10.0, 15.0, 20.0], temperature);
        rows += &format!(
            "{temperature:<4}  {:8.2}  {:6.2}  {:7.2}\n",
            s[0], s[1], s[2]
        );
        for (slot, share) in s.iter().enumerate() {
            let weight = |i: usize| (-(i as f64) * 0.5 / temperature).exp();
            let expected = weight(slot) / (0..3).map(weight).sum::<f64>();
            assert!(
                (share - expected).abs() < 0.01,
                "T {temperature}, slot {slot}: {share}"
            );
        }
    }
    expect![[r#"
        T     cheapest  middle  dearest
        0.1       0.99    0.01     0.00
        0.5       0.67    0.24     0.09
        1         0.51    0.31     0.18
        5         0.37    0.33     0.30
    "#]]
    .assert_eq(&rows);
}

#[test]
fn the_scale_of_costs_does_not_matter() {
    assert_eq!(
        shares(&[1.0, 1.5, 2.0], 0.7),
        shares(&[1e6, 1.5e6, 2e6], 0.7)
    );
}

#[test]
fn equal_costs_are_uniform() {
    let even = shares(&[3.0; 4], 0.2);
    assert!(even.iter().all(|s| (s - 0.25).abs() < 0.01), "{even:?}");
    assert_eq!(draw(&mut [], 1.0, &mut Rng::new(1)), None);
}
