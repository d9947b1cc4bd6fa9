//! Latencies and their percentiles.
pub struct Lat(pub Vec<u32>);

impl Lat {
    pub fn mean(&self) -> f64 {
        self.0.iter().map(|&x| x as f64).sum::<f64>() / self.0.len().max(1) as f64
    }
    pub fn sort(&mut self) {
        self.0.sort_unstable();
    }
    /// Call `sort` first.
    pub fn pct(&self, p: f64) -> u32 {
        if self.0.is_empty() {
            return 0;
        }
        let i = ((self.0.len() as f64 * p) as usize).min(self.0.len() - 1);
        self.0[i]
    }
}
